# SPDX-License-Identifier: Apache-2.0
"""Compiled programs on disk: a fresh process runs them without a trace and without a compilation."""

from ._digest import digest as digest
from ._file import load as load
from ._file import save as save
