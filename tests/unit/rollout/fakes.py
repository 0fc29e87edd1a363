"""Replies as an engine would send them, and a small HTTP server that plays one."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from moerl.routing.trace import Layout

LAYERS = 3
LAYOUT = Layout(layers=(1, 2), experts=8, topk=2)


def make_routes(rows: int, seed: int = 0) -> np.ndarray:
    """int32[row, layer, k] of all layers: the dense first one zero, distinct experts elsewhere."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((rows, LAYERS, LAYOUT.topk), np.int32)
    for row in range(rows):
        for layer in LAYOUT.layers:
            ids[row, layer] = rng.choice(LAYOUT.experts, LAYOUT.topk, replace=False)
    return ids


def encode(ids: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(ids, "<i4").tobytes()).decode()


def make_reply(prompt_tokens: list[int], response: list[int], *, version: str = "3", rid: str = "x") -> dict[str, Any]:
    """What SGLang answers to `/generate` with logprobs and routes."""
    return {
        "text": "7",
        "output_ids": response,
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": len(prompt_tokens),
            "output_token_logprobs": [[-0.5 - 0.25 * i, token, None] for i, token in enumerate(response)],
            "weight_versions": [{"version": version, "start": 0, "end": len(response)}],
            "routed_experts": encode(make_routes(len(prompt_tokens) + len(response) - 1)),
        },
    }


Handler = Callable[[dict[str, Any]], Awaitable[Any]]


@dataclass
class FakeEngine:
    """Plays an engine over HTTP. `handlers[path]` overrides the default answer; `seen` keeps (path, body) of every request."""

    url: str = ""
    version: str = "3"
    handlers: dict[str, Handler] = field(default_factory=dict)
    seen: list[tuple[str, Any]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        body = json.loads(text) if text else None
        self.seen.append((request.path, body))
        if request.path in self.handlers:
            result = await self.handlers[request.path](body)
        elif request.path == "/generate":
            result = [make_reply(p, [10, 2], version=self.version, rid=rid) for p, rid in zip(body["input_ids"], body["rid"], strict=True)]
        elif request.path == "/model_info":
            result = {"weight_version": self.version}
        else:
            result = {"success": True, "message": "ok"}
        return result if isinstance(result, web.StreamResponse) else web.json_response(result)

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]


@asynccontextmanager
async def fake_engine(version: str = "3") -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(version=version)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        engine.url = f"http://{host}:{port}"
        yield engine
    finally:
        await runner.cleanup()


def run(coroutine: Any, deadline_s: float = 20.0) -> Any:
    """Run a coroutine to its end, but not for ever."""
    return asyncio.run(asyncio.wait_for(coroutine, deadline_s))
