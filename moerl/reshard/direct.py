"""The direct way of weight sync: every engine rank receives exactly its own bytes, packed, from ranks that hold them.

    all trainer ranks: shards --pack--> bucket --point to point--> engine rank: checksum --unpack--> its parameters, in place

Nothing is gathered: a plan, made once from both sides' layouts and checked against what they report, says which bytes go where. Plan
and group live until an engine is replaced or a transfer fails.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING

from moerl.errors import EngineError, ReshardError
from moerl.models import ModelSpec
from moerl.models.shard import Shard
from moerl.reshard import crew, orders
from moerl.reshard import group as sync_group
from moerl.reshard.deadline import Deadline
from moerl.reshard.engine_boxes import EngineTopology, Parameter, check_engine, engine_parameters
from moerl.reshard.fp8_layout import wire_kinds
from moerl.reshard.lanes import digest
from moerl.reshard.link import EngineLink
from moerl.reshard.node import node_name
from moerl.reshard.plan import Plan, make_plan
from moerl.reshard.sender import Sender, Sent
from moerl.reshard.trainer_layout import TrainerTopology, check_shards, expected_shards, is_compressed, trainer_topology
from moerl.reshard.transport import LOST, Transport, open_transport

if TYPE_CHECKING:
    from moerl.config.schema import Parallel, Sync

logger = logging.getLogger(__name__)

_NOT_SENT = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq", "freqs_cis")
"""Parts of names of engine tensors that follow from the configuration alone."""

_Look = tuple[str, frozenset[int], bool, bool]
"""(machine, layers held, whether compressed projections are whole although tensor parallelism could cut them, whether multi-token
prediction is held)."""

_REASON_S = 5.0
"""How long a failed transfer waits for an engine to say why."""


@dataclass(frozen=True)
class Moved:
    """What a transfer moved.

    Attributes:
        wire_nbytes: sent by all ranks.
        minimum_nbytes: of all engine parameters, padding excepted.
        buckets: of all ranks.
        changed_share: of all elements, those that differ from the version before; None where that isn't known.
        received: (bytes on the wire, bytes of parameters) of each engine rank.
        travelled: wire_nbytes by kind of transport; empty where the way has only one.
    """

    wire_nbytes: int
    minimum_nbytes: int
    buckets: int
    changed_share: float | None
    received: tuple[tuple[int, int], ...]
    travelled: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Session:
    """A plan and the group it is carried out in.

    Attributes:
        plan: this rank's part; the whole of a large cluster's is large.
        buckets: of the whole plan.
        held: the version that every engine rank received last through this group.
    """

    plan: Plan
    buckets: int
    sender: Sender
    transport: Transport
    group: sync_group.SyncGroup
    epoch: int
    held: int | None = None


class Direct:
    """One trainer rank's part; all methods are collective over the trainer's ranks.

    Args:
        parallel: sizes of the trainer; how it spreads the layers is read from its shards.
        engine: how engines cut the model.
        link: the engines; on rank 0 only.
    """

    name = "direct"

    def __init__(self, spec: ModelSpec, parallel: "Parallel", engine: EngineTopology, settings: "Sync", link: EngineLink | None):
        self._spec, self._parallel, self._engine, self._settings, self._link = spec, parallel, engine, settings, link
        self._rank, self._world = crew.rank_and_world()
        self._session: _Session | None = None
        self._replies = None
        self._sent: list[Sent] = []
        self._warned: set[str] = set()

    def prepare(self, shards: Sequence[Shard], deadline: Deadline) -> None:
        """Plan and join, unless a session is there that still fits. Touches no weight.

        Raises:
            ReshardError: trainer or engines do not hold the model as the plan expects, or somebody did not join.
        """
        epoch = crew.first(lambda: self._link.epoch, deadline)
        if self._session is not None and self._session.epoch == epoch:
            return
        self.forget()
        descriptions = crew.first(lambda: self._describe(deadline), deadline)
        plan = self._plan(shards, descriptions, deadline)
        self._join(plan, epoch, deadline)

    def transfer(self, shards: Sequence[Shard], version: int, deadline: Deadline) -> Moved:
        """Send `version` to every engine rank. They must be paused and closed.

        Raises:
            ReshardError: on every rank, with the reason of the engine that refused, if one did.
        """
        session = self._session
        held = {shard.entry.megatron: shard.tensor.detach() for shard in shards}
        only_changes = self._settings.delta and session.held is not None
        base, session.held = session.held if only_changes else None, None

        def send() -> Sent:
            if self._link is not None:
                self._replies = self._start(orders.Receive(version, base, deadline.left("the engines")), deadline)
            return session.sender.send(session.transport, held.__getitem__, version, only_changes=only_changes, deadline=deadline)

        try:
            self._sent = crew.all(send, deadline)
        except ReshardError as failure:
            error = failure
            crew.first(lambda: self._reason(error), deadline)
            raise
        received = crew.first(lambda: self._received(self._replies.wait(deadline)), deadline)
        self._check(received)
        self._warn()
        session.held = version
        changed, units = (sum(getattr(sent, name) for sent in self._sent) for name in ("changed", "units"))
        return Moved(
            wire_nbytes=sum(sent.wire_nbytes for sent in self._sent),
            minimum_nbytes=session.plan.minimum_bytes,
            buckets=session.buckets,
            changed_share=changed / units if units else None,
            received=tuple((each.wire_nbytes, each.nbytes) for each in received),
            travelled=sum((sent.travelled for sent in self._sent), Counter()),
        )

    def _warn(self) -> None:
        """Say, once, why weights take a slower transport than they could."""
        reasons = {reason for sent in self._sent for reason in sent.fallbacks} - self._warned
        self._warned |= reasons
        if self._link is not None:
            for reason in sorted(reasons):
                logger.warning("weight sync takes a slower transport: %s", reason)

    def digest(self) -> str:
        """Of what was sent last."""
        return digest(self._expected())

    def verify(self, deadline: Deadline) -> None:
        """Have every engine rank read its parameters back.

        Raises:
            ReshardError: something is not what was sent.
        """
        self._check(crew.first(lambda: self._received(self._start(orders.Verify(), deadline).wait(deadline)), deadline))

    def forget(self) -> None:
        """Give up the session, after a failure or at the end."""
        session, self._session = self._session, None
        if session is not None:
            session.transport.close()
            sync_group.close(session.group)

    def _describe(self, deadline: Deadline) -> list[list[orders.Description]]:
        try:
            texts = self._start(orders.Describe(), deadline).wait(deadline)
        except EngineError as error:
            raise ReshardError(f"an engine does not say what it holds; does it run moerl's plugin moerl_sync? {error}") from error
        found = [orders.answers(text, orders.Description) for text in texts]
        for name, ranks in zip(self._link.names, found, strict=True):
            if wrong := {rank.protocol for rank in ranks} - {orders.PROTOCOL}:
                raise ReshardError(
                    f"{name} follows weight-sync protocol {wrong.pop()}, this trainer {orders.PROTOCOL}; install the same moerl"
                )
        return found

    def _plan(self, shards: Sequence[Shard], engines: list[list[orders.Description]], deadline: Deadline) -> Plan:
        """The same plan on every rank, checked against what both sides hold."""
        cpu = crew.first(lambda: self._link.backend == "gloo", deadline)
        looks = crew.all(lambda: _look(shards), deadline)
        drafts = any(name.startswith(orders.DRAFT) for name in engines[0][0].parameters)
        draft = drafts and any(look[3] for look in looks)
        if drafts and not draft and self._link is not None:
            logger.warning("engines draft with a layer that the trainer does not hold (train.mtp): it stays as they started with it")
        engine, ignored = replace(self._engine, cpu=cpu, draft=draft), _NOT_SENT if draft else (*_NOT_SENT, orders.DRAFT)
        names = [look[0] for look in looks] + [rank.node for ranks in engines for rank in ranks]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}

        def make() -> Plan:
            for reported in engines:
                held = [{name: Parameter(each.shape, each.dtype) for name, each in rank.parameters.items()} for rank in reported]
                check_engine(engine_parameters(wire_kinds(self._spec, engine), engine), held, ignored)
            trainer = self._trainer(looks)
            check_shards(
                expected_shards(self._spec, trainer, self._rank), {s.entry.megatron: tuple(s.tensor.shape) for s in shards}, self._rank
            )
            return make_plan(
                self._spec,
                trainer,
                engine,
                bucket_bytes=self._settings.bucket_bytes,
                ranks_per_node=1,
                nodes=[numbers[name] for name in names],
            )

        plans: list[Plan] = []
        digests = crew.all(lambda: (plans.append(make()), plans[0].digest())[1], deadline)
        if len(set(digests)) > 1:
            raise ReshardError(
                f"the trainer's ranks made {len(set(digests))} different plans of one transfer; they must run the same moerl"
            )
        return plans[0]

    def _trainer(self, looks: Sequence[_Look]) -> TrainerTopology:
        """Sizes from the settings, the spread of layers and the kind of layers from what the ranks hold."""
        per_stage = self._world // self._parallel.pp
        owners = {layer: rank // per_stage for rank, look in enumerate(looks) for layer in look[1]}
        stages = tuple(len(list(run)) for _, run in groupby(owners[layer] for layer in sorted(owners)))
        whole = any(look[2] for look in looks)
        found = trainer_topology(self._parallel, self._world, transformer_engine=whole, stages=stages if self._parallel.pp > 1 else ())
        return replace(found, mtp=any(look[3] for look in looks))

    def _join(self, plan: Plan, epoch: int, deadline: Deadline) -> None:
        """Make the group of all trainer ranks and all engine ranks, trainer ranks first."""
        world, kind = plan.senders + plan.receivers, self._settings.transport
        store, replies = None, None

        def invite() -> tuple[str, str, int, str]:
            nonlocal store, replies
            link, tp = self._link, self._link.tp
            store = sync_group.open_store(link.host, world, deadline)
            name = sync_group.unique_name()
            parts = [plan.only(receiver=rank).encode() for rank in range(plan.receivers)]
            replies = self._start_each(
                [
                    orders.Join(
                        link.host,
                        store.port,
                        name,
                        link.backend,
                        plan.senders + first,
                        world,
                        parts[first : first + tp],
                        list(plan.nodes),
                        kind,
                        deadline.left("the engines"),
                    )
                    for first in range(0, plan.receivers, tp)
                ],
                deadline,
            )
            return link.host, store.port, name, link.backend

        host, port, name, backend = crew.first(invite, deadline)

        def meet() -> _Session:
            interrupt = replies.check if replies is not None else None
            mine = store or sync_group.reach_store(host, port, world, deadline)
            group = sync_group.join(mine, name, backend, world, deadline, rank=self._rank, interrupt=interrupt)
            transport = open_transport(kind, group, self._rank, plan.bucket_bytes, plan.nodes)
            sender = Sender(plan, self._rank, keeps=self._settings.delta)
            self._session = _Session(plan.only(sender=self._rank), len(plan.buckets), sender, transport, group, epoch)

        crew.all(meet, deadline)
        crew.first(lambda: replies.wait(deadline) and None, deadline)

    def _start(self, order: orders.Order, deadline: Deadline):
        return self._start_each([order] * len(self._link.names), deadline)

    def _start_each(self, given: Sequence[orders.Order], deadline: Deadline):
        """An order for each engine, under way."""
        common = {"load_format": orders.LOAD_FORMAT, "timeout_s": deadline.left("the engines")}
        return self._link.start("order", [{"order": orders.encode(order), **common} for order in given])

    def _received(self, texts: Sequence[str]) -> list[orders.Received]:
        """What each engine rank received, in the order of the plan's receivers."""
        return [rank for text in texts for rank in orders.answers(text, orders.Received)]

    def _reason(self, error: ReshardError) -> None:
        """Prefer the engine's own words to what its leaving looks like from here."""
        self.forget()
        if self._replies is None:
            return
        said = self._replies.failures(Deadline("the engines' reasons", _REASON_S))
        if causes := [words for words in said if LOST not in words] or said:
            raise ReshardError(f"{'; '.join(dict.fromkeys(causes))} (at the trainer: {error})") from error

    def _expected(self) -> list[list[int]]:
        """The checksums of what was sent, for each receiver in the order in which it receives."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in range(self._session.plan.receivers)]
        for sender, sent in enumerate(self._sent):
            for receiver, step, checksum in sent.checksums:
                found[receiver].append((step, sender, checksum))
        return [[checksum for _, _, checksum in sorted(ranks)] for ranks in found]

    def _check(self, received: Sequence[orders.Received]) -> None:
        expected = self._expected()
        wrong = [
            f"engine rank {rank}: bucket {number}"
            if len(want) == len(got.checksums)
            else f"engine rank {rank}: {len(got.checksums)} buckets"
            for rank, (want, got) in enumerate(zip(expected, received, strict=True))
            for number in range(len(want))
            if number >= len(got.checksums) or want[number] != got.checksums[number]
        ]
        if wrong:
            raise ReshardError(
                f"{len(wrong)} buckets are not in the engines as they were sent:\n" + "\n".join(f"  - {line}" for line in wrong)
            )


def _look(shards: Sequence[Shard]) -> _Look:
    ahead = any(shard.entry.param.layers == "mtp" for shard in shards)
    layers = frozenset(shard.entry.layer for shard in shards if shard.entry.layer is not None and shard.entry.param.layers != "mtp")
    cut = any(shard.parts > 1 for shard in shards if not shard.entry.param.expert)
    whole = cut and any(shard.parts == 1 and is_compressed(shard.entry.param) for shard in shards)
    return node_name(), layers, whole, ahead
