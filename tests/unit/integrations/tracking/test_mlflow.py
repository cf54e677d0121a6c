"""MLflow, in a database of the test's own."""

from pathlib import Path

import pytest

from tests.unit.integrations.tracking.runs import LOG, RUN_ID, python

pytest.importorskip("mlflow")

READ = """
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("some project").experiment_id])
points = client.get_metric_history(run.info.run_id, "reward/mean")
print(run.info.run_name, run.info.status, run.data.params, run.data.tags["rollstream.run_id"], sep=";")
print([(point.step, point.value) for point in points], sorted(run.data.metrics))
"""


@pytest.mark.slow  # its import takes seconds
def test_a_second_process_goes_on_in_the_same_run(tmp_path: Path) -> None:
    assert "LAST None" in python(LOG, tmp_path, "MlflowTracker", "1", "4")
    assert "LAST 4" in python(LOG, tmp_path, "MlflowTracker", "7")
    about, figures = python(READ, tmp_path).splitlines()[-2:]
    assert about == f"an experiment;FINISHED;{{'data/seed': '3'}};{RUN_ID}"
    assert figures == ("[(1, 0.5), (4, 2.0), (7, 3.5)] ['progress/done', 'reward/a_b_c/mean', 'reward/mean']")
