# SPDX-License-Identifier: Apache-2.0
"""The parts of random programs, a module for each subject."""

from random_parts import caches, classes, functions, mappings, numbers, threads

PARTS = caches.PARTS | classes.PARTS | functions.PARTS | mappings.PARTS | numbers.PARTS | threads.PARTS
