"""The ops with torch.distributed: two processes run the checks in distributed_checks.py, with gloo
on the CPU and, if there are two GPUs, with NCCL."""

import sys

import pytest
import torch
import torch.distributed
from samples import DIFFERENTIABLE, named

if sys.platform == "win32" or not torch.distributed.is_available():
    pytest.skip("this torch is built without torch.distributed", allow_module_level=True)

import distributed_checks

pytestmark = pytest.mark.slow

TIMEOUT = 120  # seconds per check: a rank that waits for another must not hang the suite

DEVICES = ["cpu"] + ["cuda"] * (torch.cuda.device_count() >= distributed_checks.RANKS)


@pytest.fixture(scope="module", params=DEVICES)
def on_both_ranks(request, tmp_path_factory):
    context = torch.multiprocessing.get_context("spawn")
    store = str(tmp_path_factory.mktemp("store") / "file")
    tasks = [context.Queue() for _ in range(distributed_checks.RANKS)]
    results = context.Queue()
    ranks = [
        context.Process(
            target=distributed_checks.serve, args=(rank, request.param, store, queue, results)
        )
        for rank, queue in enumerate(tasks)
    ]
    for process in ranks:
        process.start()

    def run(check, *args):
        for queue in tasks:
            queue.put((check.__name__, args))
        errors = [results.get(timeout=TIMEOUT) for _ in ranks]
        if any(errors):
            pytest.fail("".join(error for error in errors if error), pytrace=False)

    yield run
    for queue in tasks:
        queue.put(None)
    for process in ranks:
        process.join(timeout=30)
        if process.is_alive():
            process.kill()


@pytest.mark.parametrize("size", [4, 3])
@pytest.mark.parametrize(**named(DIFFERENTIABLE))
def test_every_sharding(op, size, on_both_ranks):
    on_both_ranks(distributed_checks.every_sharding, op.name, size)


def test_products_keep_what_is_sharded(on_both_ranks):
    on_both_ranks(distributed_checks.placements_of_products)


def test_sums_keep_what_is_sharded(on_both_ranks):
    on_both_ranks(distributed_checks.placements_of_sums)


def test_products_of_two_types(on_both_ranks):
    on_both_ranks(distributed_checks.products_of_two_types)


def test_heads_of_attention_stay_sharded(on_both_ranks):
    on_both_ranks(distributed_checks.heads_of_attention)


def test_recurrent_batches_stay_sharded(on_both_ranks):
    on_both_ranks(distributed_checks.recurrent_batches)


def test_rows_are_flattened_where_they_lie(on_both_ranks):
    on_both_ranks(distributed_checks.rows_that_are_flattened)


def test_tensor_parallel_layers(on_both_ranks):
    on_both_ranks(distributed_checks.column_then_row)


@pytest.mark.parametrize("compiled", [False, True])
def test_distributed_data_parallel(compiled, on_both_ranks):
    on_both_ranks(distributed_checks.data_parallel, compiled)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("by_cell", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_fully_shard(mixed, by_cell, bias, on_both_ranks):
    on_both_ranks(distributed_checks.fully_sharded, mixed, by_cell, bias)


def test_distributed_checkpoint(on_both_ranks, tmp_path):
    on_both_ranks(distributed_checks.saved_and_loaded, str(tmp_path / "checkpoint"))
