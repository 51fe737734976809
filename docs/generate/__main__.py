"""Renews all pages that are generated from the sources: `make docs`, or `python -m docs.generate`."""

from docs.generate import PAGES, ROOT

if __name__ == "__main__":
    for name, generate in PAGES.items():
        path = ROOT / "docs" / name
        path.write_text(generate(path.read_text()))
