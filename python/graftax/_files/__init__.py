# SPDX-License-Identifier: Apache-2.0
"""Files: one standard safetensors file for the arrays of an object graph, with the graph in its metadata."""

from ._checkpoints import Checkpoints as Checkpoints
from ._errors import LoadError as LoadError
from ._load import load as load
from ._peek import Peek as Peek
from ._peek import peek as peek
from ._write import save as save
