"""``python -m tinyvae.config docs/configuration.md``: write the current table of settings into a document."""

from __future__ import annotations

import sys
from pathlib import Path

from tinyvae.config.tables import with_current_table

for name in sys.argv[1:]:
    Path(name).write_text(with_current_table(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
