"""A cluster that tests change."""

import json

import pytest

from vllm_tide.plan.cluster import EXAMPLE


@pytest.fixture
def cluster_file(tmp_path):
    def write(**changes):
        content = json.loads(json.dumps(EXAMPLE))
        for key, value in changes.items():
            *path, last = key.split("__")
            at = content
            for part in path:
                at = at[int(part) if part.isdigit() else part]
            if value is None:
                at.pop(int(last) if last.isdigit() else last)
            else:
                at[last] = value
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(content))
        return path

    return write
