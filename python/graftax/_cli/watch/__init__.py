# SPDX-License-Identifier: Apache-2.0
"""`python -m graftax run --watch`: what a program does with its own `jit`, and what graftax would change."""
