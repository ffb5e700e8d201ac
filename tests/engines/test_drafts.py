"""The servers' draft counts between two calls."""

from types import SimpleNamespace

import pytest
from aiohttp import web

from tests.engines.fake_server import fake_server
from trl_darts.engines import VLLMServerEngine
from trl_darts.engines.preflight import ServerFacts
from trl_darts.engines.server_metrics import DraftCounts
from trl_darts.engines.vllm_generation import SyncedGeneration


METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:generation_tokens_total{engine="0",model_name="m"} %d
"""


@pytest.fixture
def generation():
    made = SyncedGeneration.__new__(SyncedGeneration)
    made._draft_counts, made.facts = {}, ServerFacts("m", 100, drafts=True)
    made.main = SimpleNamespace(is_here=True)
    yield made
    made.engine.close()


def test_from_one_look_to_the_next(generation):
    numbers = iter([(10, 100), (14, 160), None, (20, 200), (3, 30)])

    async def metrics(request):
        now = next(numbers)
        return web.Response(status=500) if now is None else web.Response(text=METRICS % now)

    with fake_server({"GET /metrics": metrics}) as url:
        generation.engine = VLLMServerEngine([url])
        assert generation.drafted() is None
        assert generation.drafted() == DraftCounts(4, 0, 0, 60)
        assert generation.drafted() is None  # it does not answer
        assert generation.drafted() is None  # it is back, and counts from here on
        assert generation.drafted() == DraftCounts(3, 42, 20, 30)  # it was started anew
        generation.facts = ServerFacts("m", 100)
        assert generation.drafted() is None
