# SPDX-License-Identifier: Apache-2.0
"""Compiled programs on disk: a fresh process runs them without a trace and without a compilation."""

from graftax._export.program_file import load as load
from graftax._export.program_file import save as save
