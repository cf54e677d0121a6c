"""A server that is away when the trainer has new weights for it."""

import threading
from pathlib import Path

from rollstream.engine.sglang import SGLangEngine
from rollstream.testing.stub_faults import Faults
from rollstream.training import BatchesAhead, CallableGenerator, PlannedGroup, ShuffledPlan
from tests.faults.runs import stub_in_thread


def test_weights_reach_a_server_that_comes_back(tmp_path: Path) -> None:
    async def generate(group: PlannedGroup) -> list[int]:
        return [group.index]

    with stub_in_thread() as server:
        engine = SGLangEngine([server.url])
        generator = CallableGenerator(
            generate, start=engine.start, update_weights=engine.update_weights, close=engine.close
        )
        with BatchesAhead(ShuffledPlan(8), generator, groups_per_step=2, weight_timeout=60.0) as batches:
            batches.trained(batches.next_batch(60).step)
            server.faults = Faults(broken_http=True)
            later = threading.Timer(1.5, lambda: setattr(server, "faults", Faults()))
            later.start()
            batches.update_weights(str(tmp_path))
            later.join()
            assert batches.engine_version == 1
            assert batches.next_batch(60).step == 1
        assert server.weight_version == "1"
