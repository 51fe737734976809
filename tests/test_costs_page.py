"""docs/costs.md shows the catalogue as it is, and its example is a cluster."""

from checkout import ROOT

from docs.generate.costs import describe
from motet.cluster import DEVICES, LINKS
from motet.config import ClusterConfig, RunConfig
from motet.strict_parsing import read_yaml

PAGE = (ROOT / "docs" / "costs.md").read_text()


def test_the_page_is_up_to_date():
    assert describe(PAGE) == PAGE, "run: make docs"
    for name in (*DEVICES, *LINKS):
        assert f"| `{name}` |" in PAGE


def test_the_pages_example_can_be_read(tmp_path):
    example = PAGE.partition("    cluster:\n")[2].partition("\n\n")[0]
    (tmp_path / "cluster.yaml").write_text(f"cluster:\n{example}\n")
    cluster = ClusterConfig.model_validate(read_yaml(tmp_path / "cluster.yaml", RunConfig, "run file")["cluster"])
    assert cluster.devices["mine"].memory_bytes == 9.6e10
    assert cluster.links["bridge"].bytes_per_s == 1e11
