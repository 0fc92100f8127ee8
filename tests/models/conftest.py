"""Import torchvision, also one that was built for another version of torch."""

import runpy
from pathlib import Path

_TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "any_torchvision.py"))
LIBRARY = _TOOL["import_torchvision"]()  # keeps the declarations alive
