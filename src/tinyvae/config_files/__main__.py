"""``python -m tinyvae.config_files docs/configuration.md``: write the current table of settings into a document."""

from __future__ import annotations

import sys
from pathlib import Path

from tinyvae.config_files.tables import with_current_table

for name in sys.argv[1:]:
    Path(name).write_text(with_current_table(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
