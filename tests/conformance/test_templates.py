"""Real chat templates: what stands between turns is what the whole rendering has there.

    python -m tests.conformance.test_templates     prints the table

The templates lie in a folder, one `*.jinja` each: `ROLLSTREAM_TEMPLATES`, or `../shared/templates` beside the project.
"""

import os
from pathlib import Path

import pytest

from tests.support.turns import try_template

FOLDER = Path(os.environ.get("ROLLSTREAM_TEMPLATES") or Path(__file__).parents[3] / "shared" / "templates")
TEMPLATES = sorted(FOLDER.glob("*.jinja"))


@pytest.mark.skipif(not TEMPLATES, reason=f"no chat templates in {FOLDER}: set ROLLSTREAM_TEMPLATES")
@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_between_turns_stands_what_the_whole_rendering_has_there(file: Path) -> None:
    assert try_template(file.read_text("utf-8")).differences == []


def main() -> None:
    """Prints the table."""
    total = [0, 0, 0]
    print(f"{'template':60} tried refused differences")
    for file in TEMPLATES:
        report = try_template(file.read_text("utf-8"))
        counts = [report.tried, report.refused.total(), len(report.differences)]
        print(f"{file.stem:60} {counts[0]:5} {counts[1]:7} {counts[2]:11}")
        for line in [*report.refused, *report.differences]:
            print(f"    {line[:300]}")
        total = [sum(pair) for pair in zip(total, counts, strict=True)]
    print(f"{f'{len(TEMPLATES)} templates':60} {total[0]:5} {total[1]:7} {total[2]:11}")


if __name__ == "__main__":
    main()
