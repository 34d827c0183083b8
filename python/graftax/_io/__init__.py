# SPDX-License-Identifier: Apache-2.0
"""Files: one standard safetensors file for the arrays of an object graph, with the graph in its metadata."""

from graftax._io.checkpoints import Checkpoints as Checkpoints
from graftax._io.errors import LoadError as LoadError
from graftax._io.load import load as load
from graftax._io.peek import Peek as Peek
from graftax._io.peek import peek as peek
from graftax._io.save import save as save
