"""Generation of groups: prompts in, checked groups of completions out, spread over the engines.

One HTTP request carries one group, so that its completions share the prompt's prefill and a request is small enough to
balance engines. Groups come back in the order of the prompts, whichever finishes first. The first failure ends the call:
the other requests are cancelled here and aborted in the engines.
"""

import asyncio
import logging
from collections.abc import Sequence

from moerl.errors import EngineError
from moerl.rollout.check import to_sample
from moerl.rollout.client import EngineClient
from moerl.rollout.sample import Group, Prompt
from moerl.routing.codec import NARROW, Codec
from moerl.routing.trace import Layout

logger = logging.getLogger(__name__)


async def generate_groups(
    clients: Sequence[EngineClient],
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    routes: bool,
    layout: Layout,
    layers: int,
    version: int | None,
    tag: str = "group",
    codec: Codec = NARROW,
) -> list[Group]:
    """Sample `group_size` completions of every prompt.

    Args:
        clients: one per engine; prompts are dealt out in turn.
        temperature: 0 is greedy.
        layers: decoder layers of the model, dense ones included.
        version: weight version that every token must come from; None accepts any.
        tag: begins the request ids `tag.position.index`; calls that overlap need different tags.
        codec: how the routes are stored in the samples.

    Raises:
        EngineError: a request failed; the first failure, with the other requests aborted.
        RolloutError, TraceError: a reply does not prove itself.
    """
    if not clients:
        raise EngineError("no engine to generate with")

    running: dict[int, list[str]] = {}

    async def one(position: int, prompt: Prompt) -> Group:
        engine = position % len(clients)
        rids = running[position] = [f"{tag}.{position}.{index}" for index in range(group_size)]
        replies = await clients[engine].generate_many(
            [prompt.tokens] * group_size, rids=rids, max_new_tokens=max_new_tokens, temperature=temperature, routes=routes
        )
        del running[position]
        samples = [
            to_sample(reply, prompt, index, layout, layers=layers, routes=routes, version=version, engine=engine, codec=codec)
            for index, reply in enumerate(replies)
        ]
        return Group(prompt.id, prompt.answer, samples)

    tasks = [asyncio.create_task(one(position, prompt)) for position, prompt in enumerate(prompts)]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await _abandon([(clients[position % len(clients)], rid) for position, rids in running.items() for rid in rids], tasks)
        raise


async def _abandon(requests: Sequence[tuple[EngineClient, str]], tasks: Sequence[asyncio.Task[Group]]) -> None:
    """Abort what runs, one by one: an engine ignores ids that it doesn't know, prefixes of known ones too."""
    for result in await asyncio.gather(*(client.abort(rid) for client, rid in requests), return_exceptions=True):
        if isinstance(result, EngineError):
            # The failure that led here is the one to report; an engine that is gone has nothing left to abort.
            logger.info("abort after a failed generation: %s", result)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
