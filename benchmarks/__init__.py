# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of one call: graftax beside the libraries it replaces."""
