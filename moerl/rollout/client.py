"""Asyncio client of one SGLang server: generation and the endpoints of a weight update.

Flow: token ids in, raw replies out (`check.py` turns them into samples). Every failure is an `EngineError` that names the
url, the endpoint, and the status and body or the deadline. Only reading requests are repeated after a failed connection;
a request that changes the engine is sent once.
"""

import asyncio
import base64
import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from moerl.errors import EngineError

_BODY_CHARACTERS = 2000
_READ_ATTEMPTS = 4
KEEP_ALIVE_S = 15.0
"""How long an idle connection is kept. The server must keep it longer: one that closes it first can break a request under way."""

PauseMode = Literal["abort", "retract", "in_place"]


class EngineClient:
    """Talks to the engine at `url`; use as an async context manager within one event loop.

    Args:
        request_timeout_s: deadline of a control request.
        generate_timeout_s: deadline of a generation request, from sending to the complete reply.
    """

    def __init__(self, url: str, request_timeout_s: float, generate_timeout_s: float):
        self.url = url.rstrip("/")
        self.request_timeout_s = request_timeout_s
        self.generate_timeout_s = generate_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # One connection per request in flight: the engine queues requests itself, a pool limit would only hide that.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def generate(self, prompt_tokens: Sequence[int], *, rid: str, **options: Any) -> dict[str, Any]:
        """One completion; the raw reply with logprobs of the sampled tokens. Options as for `generate_many`."""
        return (await self.generate_many([prompt_tokens], rids=[rid], **options))[0]

    async def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rids: Sequence[str],
        max_new_tokens: int,
        temperature: float,
        routes: bool,
        routes_from: int = 0,
        version: int | None = None,
        top_p: float = 1.0,
        top_k: int = -1,
    ) -> list[dict[str, Any]]:
        """One completion per prompt in one HTTP request; raw replies in the order of `prompts`.

        Args:
            temperature: 0 is greedy.
            routes: return the rows of routes, of prompt and completion.
            routes_from: first row to return, of every prompt. Rows before it are known from an earlier turn, or from the request
                that this one resumes; at most `len(prompt) - 1`, the row of the first sampled token.
            version: of the weights that are meant to answer. Prefixes are shared only among requests of one version, so that none reads
                what another version computed, whatever is left in the engine's cache.
            top_p, top_k: what to cut the distribution to; 1 and -1 leave it whole. With either, the reply also holds which tokens were
                kept at each position, and logprobs within them (SGLang refuses a top_p without a finite top_k).
        """
        body = {
            "rid": list(rids),
            "input_ids": [list(tokens) for tokens in prompts],
            "return_logprob": True,
            "return_sampling_mask": top_p < 1 or top_k > 0,
            "return_routed_experts": routes,
            "routed_experts_start_len": routes_from,
            "extra_key": None if version is None else f"version {version}",
            # All spelled out: the model folder's generation_config may hold defaults that would make logprobs and
            # sampling distribution disagree.
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            },
        }
        replies = await self._post("/generate", body, self.generate_timeout_s)
        if not isinstance(replies, list) or len(replies) != len(prompts):
            got = len(replies) if isinstance(replies, list) else type(replies).__name__
            raise EngineError(f"{self.url}/generate: expected {len(prompts)} replies, got {got}")
        by_rid = {reply["meta_info"]["id"]: reply for reply in replies}
        if missing := [rid for rid in rids if rid not in by_rid]:
            raise EngineError(f"{self.url}/generate: no reply to request {missing[0]} ({len(missing)} of {len(rids)} are missing)")
        return [by_rid[rid] for rid in rids]

    async def abort(self, rid: str) -> None:
        """Abort a request; its reply then holds what it had sampled.

        An id that the engine doesn't know is ignored, with success. With a known one, requests whose ids begin with it end too.
        """
        await self._post("/abort_request", {"rid": rid}, self.request_timeout_s)

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"rid": "", "abort_all": True}, self.request_timeout_s)

    async def init_group(self, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str) -> None:
        """Make the engine's ranks join a process group as ranks `rank_offset …`; all other ranks must join meanwhile."""
        body = {"master_address": host, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        await self._command("/init_weights_update_group", body | {"group_name": name, "backend": backend})

    async def destroy_group(self, name: str) -> None:
        await self._command("/destroy_weights_update_group", {"group_name": name})

    async def begin_update(self) -> None:
        await self._command("/begin_weight_update", {})

    async def end_update(self) -> None:
        await self._command("/end_weight_update", {})

    async def receive_bucket(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        version: int | None,
        flush: bool,
    ) -> None:
        """Make the engine receive one flattened bucket from rank 0 of `group`; returns after it has been loaded.

        Args:
            names, dtypes, shapes: full Hugging Face tensors in the order of the bucket; dtypes as "bfloat16".
            version: weight version from now on; None leaves the current one.
            flush: drop the prefix cache, whose entries belong to the old weights.
        """
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": flush,
            "weight_version": None if version is None else str(version),
        }
        await self._command("/update_weights_from_distributed", body)

    async def order(self, order: str, load_format: str, timeout_s: float) -> str:
        """Hand an order to the plugin that answers to `load_format`; its answer."""
        body = {"serialized_named_tensors": [base64.b64encode(order.encode()).decode()], "load_format": load_format, "flush_cache": False}
        reply = await self._post("/update_weights_from_tensor", body, timeout_s)
        return reply["message"]

    async def set_version(self, version: int) -> None:
        """Change only the version's name; running requests go on."""
        await self._command("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def flush_cache(self) -> None:
        """Drop the prefix cache; refused by the engine while requests run."""
        await self._post("/flush_cache", {}, self.request_timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        await self._post("/pause_generation", {"mode": mode}, self.request_timeout_s)

    async def resume(self) -> None:
        await self._post("/continue_generation", {}, self.request_timeout_s)

    async def slow_down(self, forward_s: float) -> None:
        """Make every forward pass take so much longer, for measurements; 0 ends it."""
        await self._post("/slow_down", {"forward_sleep_time": forward_s}, self.request_timeout_s)

    async def load(self) -> int:
        """Requests that the engine runs or has waiting, as of its last forward pass or few."""
        return sum(one["num_running_reqs"] + one["num_waiting_reqs"] for one in (await self._get("/v1/loads"))["loads"])

    async def version(self) -> int:
        """The weight version that the engine serves."""
        text = str((await self._get("/model_info"))["weight_version"])
        if not text.isdecimal():
            raise EngineError(f"{self.url}/model_info: expected a whole number as weight version, got {text!r}")
        return int(text)

    async def checksums(self) -> list[dict[str, str]]:
        """Parameter name -> hash of its bytes (`plugin.hash_tensor`), one dict per engine rank in rank order."""
        reply = await self._command("/weights_checker", {"action": "checksum"})
        ranks = sorted(reply["ranks"], key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        return [rank["checksums"] for rank in ranks]

    async def _command(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._post(path, body, self.request_timeout_s)
        if reply["success"] is not True:
            raise EngineError(f"{self.url}{path} was refused: {reply['message']}")
        return reply

    async def _get(self, path: str) -> Any:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(aiohttp.ClientConnectorError),
            stop=stop_after_attempt(_READ_ATTEMPTS),
            wait=wait_exponential(multiplier=0.1, max=1.0),
            reraise=True,
        )
        return await self._guard(path, self.request_timeout_s, lambda: retrying(self._send, "GET", path, None))

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        return await self._guard(path, timeout_s, lambda: self._send("POST", path, body))

    async def _guard(self, path: str, timeout_s: float, send: Any) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await send()
        except TimeoutError as error:
            raise EngineError(f"{self.url}{path} did not answer within {timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineError(f"{self.url}{path}: cannot connect ({error.strerror}); the engine is not running") from error
        except aiohttp.ClientError as error:
            raise EngineError(f"{self.url}{path}: the connection broke ({error}); the engine may have died") from error

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        if self._session is None:
            raise EngineError(f"{self.url}{path}: this client is closed; use it as an async context manager")
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
            raw = await response.read()
            if response.status != 200:
                text = raw.decode(errors="replace")[:_BODY_CHARACTERS]
                raise EngineError(f"{self.url}{path} answered HTTP {response.status}: {text}")
        try:
            return json.loads(raw)
        except json.JSONDecodeError:
            # Some control endpoints answer in plain text.
            return raw.decode(errors="replace")
