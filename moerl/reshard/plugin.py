"""What weight sync adds inside SGLang's processes, so that an engine's ranks receive their own bytes. SGLang itself is not changed.

SGLang calls `register` in every process it starts (entry point group `sglang.srt.plugins`, name `moerl_sync`). Orders come in through
`/update_weights_from_tensor` with `load_format` "moerl":

    HTTP --main process: _control--> schedulers --each rank: _obey--> Rank --> answers of all ranks --> HTTP

The fence is in the main process: from `Close` on, `/continue_generation` is refused with HTTP 409 until `Commit` has succeeded, whatever
fails between them. An order that fails on one rank fails on all: the ranks compare before anybody answers. A rank that fails leaves
the group, so that its peers' waits end at once.
"""

import base64
import multiprocessing
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from moerl.reshard import orders
from moerl.reshard.node import node_name

_SCHEDULER = "sglang.srt.managers.scheduler"
_FENCE = "moerl_closed"
_CONFLICT = 409


def register() -> None:
    """Entry point. Hooks the main process and the processes that hold a model; does nothing in others."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if _SCHEDULER in sys.modules:
        updates = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        HookRegistry.register(f"{updates}.update_weights_from_tensor", _obey, HookType.AROUND)
        HookRegistry.register(f"{_SCHEDULER}.Scheduler.pause_generation", _pause, HookType.AROUND)
    if multiprocessing.parent_process() is None:
        control = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
        HookRegistry.register(f"{control}.update_weights_from_tensor", _control, HookType.AROUND)
        manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
        HookRegistry.register(f"{manager}.continue_generation", _continue, HookType.AROUND)


async def _control(original: Callable[..., Awaitable[Any]], manager: Any, request: Any, *rest: Any) -> tuple[bool, str]:
    """The main process's part of an order: keep the fence, pass it on, name the version."""
    if request.load_format != orders.LOAD_FORMAT:
        return await original(manager, request, *rest)
    manager.auto_create_handle_loop()
    try:
        order = _read(request)
    except Exception as error:  # noqa: BLE001 - an order that cannot be read is refused, it must not end the server
        return False, str(error)
    if isinstance(order, orders.Close):
        setattr(manager, _FENCE, True)
        return True, "[]"
    if isinstance(order, orders.Receive) and not (manager.is_pause and getattr(manager, _FENCE, False)):
        return False, "weights are received by a paused and closed engine only: pause it, then send the order to close"
    results = await manager.update_weights_from_tensor_communicator(request)
    # Under data-parallel attention several ranks report; each says what all ranks of the engine agreed on.
    success, message = all(result.success for result in results), results[0].message
    if success and isinstance(order, orders.Commit):
        manager._update_weight_version_if_provided(str(order.version))
        setattr(manager, _FENCE, False)
    return success, message


async def _continue(original: Callable[..., Awaitable[Any]], manager: Any, *args: Any) -> Any:
    if getattr(manager, _FENCE, False):
        from fastapi import HTTPException

        raise HTTPException(_CONFLICT, "this engine does not hold a complete version of its weights; send all of them first")
    return await original(manager, *args)


def _pause(original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
    result = original(scheduler, *args)
    # Paused in place with requests in flight, SGLang's watchdog would take a long wait for weights for a hang and end the server.
    scheduler.cur_batch_for_debug = None
    return result


def _obey(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """A rank's part of an order. All ranks of the engine come here together, and answer the same."""
    if request.load_format != orders.LOAD_FORMAT:
        return original(manager, request)
    import torch.distributed as dist
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    from moerl.reshard.transport import LOST

    try:
        mine = True, msgspec.to_builtins(_rank(manager).obey(_read(request)))
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the server, and the other ranks must hear of it
        _rank(manager).leave()
        mine = False, f"rank {_tp_rank()}: {type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size(manager.tp_cpu_group)
    dist.all_gather_object(everyone, mine, group=manager.tp_cpu_group)
    failures = [answer for fine, answer in everyone if not fine]
    causes = [words for words in failures if LOST not in words] or failures  # the others only lost a rank that failed by itself
    message = "\n".join(causes) if failures else msgspec.json.encode([answer for _, answer in everyone]).decode()
    return UpdateWeightsFromTensorReqOutput(success=not failures, message=message)


def _read(request: Any) -> orders.AnyOrder:
    (payload,) = request.serialized_named_tensors
    return orders.decode(base64.b64decode(payload) if isinstance(payload, str) else payload)


_ranks: dict[int, "Rank"] = {}


def _rank(manager: Any) -> "Rank":
    return _ranks.setdefault(id(manager), Rank(manager))


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


class Rank:
    """One rank of the engine: its live parameters, and what it shares with the trainer."""

    def __init__(self, manager: Any):
        self._manager = manager
        self._receiver: Any = None

    def obey(self, order: orders.AnyOrder) -> Any:
        """Carry out an order; what it is answered with."""
        match order:
            case orders.Describe():
                return self._describe()
            case orders.Join():
                return self._join(order)
            case orders.Receive():
                return self._receive(order)
            case orders.Verify():
                return self._verify()
            case orders.Commit():
                return self._commit(order)
            case orders.Leave():
                return self.leave()
            case orders.Read():
                held = self._parameters()
                return orders.Values({name: held[name].float().cpu().numpy().tobytes() for name in order.names if name in held})
        raise ValueError(f"the ranks of an engine have no part in {order}")

    def leave(self) -> None:
        """Give up the group, which ends every peer's wait for this rank."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.transport.close()

    def _models(self) -> dict[str, Any]:
        """What names of parameters begin with -> the model that is served, and the one that drafts for it if there is one."""
        return {"" if role == "target" else f"{role}.": runner.model for role, runner in self._manager._select_runners("all")}

    def _parameters(self) -> dict[str, Any]:
        found = {before + name: each.detach() for before, model in self._models().items() for name, each in model.named_parameters()}
        served = {each.data_ptr() for name, each in found.items() if not name.startswith(orders.DRAFT)}
        # A drafting model's embedding and output layer are those of the model that is served.
        return {name: each for name, each in found.items() if not (name.startswith(orders.DRAFT) and each.data_ptr() in served)}

    def _describe(self) -> orders.Description:
        found = {}
        for name, parameter in self._parameters().items():
            dtype = str(parameter.dtype).removeprefix("torch.")
            found[name] = orders.Described(tuple(parameter.shape), dtype if parameter.is_contiguous() else f"{dtype} (not contiguous)")
        return orders.Description(orders.PROTOCOL, node_name(), found)

    def _join(self, order: orders.Join) -> None:
        from moerl.reshard import group
        from moerl.reshard.deadline import Deadline
        from moerl.reshard.plan import decode_plan
        from moerl.reshard.receiver import Receiver
        from moerl.reshard.transport import open_transport

        self.leave()
        deadline = Deadline("joining the trainer", order.timeout_s)
        plan = decode_plan(order.plans[_tp_rank()])
        rank = order.rank + _tp_rank()
        store = group.reach_store(order.host, order.port, order.world, deadline)
        joined = group.join(store, order.name, order.backend, order.world, deadline, rank=rank)
        transport = open_transport(order.kind, joined, rank, plan.bucket_bytes, order.nodes)
        self._receiver = Receiver(plan, transport, self._parameters())

    def _receive(self, order: orders.Receive) -> orders.Received:
        from moerl.reshard.deadline import Deadline

        _synchronise()
        return self._joined().receive(order.version, order.base, Deadline(f"receiving version {order.version}", order.timeout_s))

    def _verify(self) -> orders.Received:
        if wrong := [before + name for before, model in self._models().items() for name in _stale(model)]:
            raise ValueError(f"not what kv_b_proj says: {', '.join(wrong)}")
        return self._joined().read_back()

    def _commit(self, order: orders.Commit) -> None:
        from sglang.srt.runtime_context import get_serving

        scheduler, before = self._manager.scheduler, get_serving().weight_version
        _forget_cache(scheduler)
        self._manager.record_weight_version_after_update(str(order.version))
        if before != str(order.version):
            _name_pending_tokens(scheduler, before)
        if self._receiver is not None:
            self._receiver.version = order.version

    def _joined(self) -> Any:
        if self._receiver is None:
            raise ValueError("this rank has not joined the trainer, or left it after a failure")
        return self._receiver


def _forget_cache(scheduler: Any) -> None:
    """Drop the prefix cache. What running requests still read stays, under the key of their own version (`extra_key`)."""
    if scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused):
        scheduler.flush_cache(empty_cache=False)  # the allocator keeps its memory; giving it back takes longer than the update
        return
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    scheduler.tree_cache.evict(EvictParams(num_tokens=sys.maxsize))


def _name_pending_tokens(scheduler: Any, version: str) -> None:
    """Tokens that were computed before a pause in place, but not yet handed to their requests, are of the version before the update.

    SGLang counts the tokens that a request has when its version changes, and those come later.
    """
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    for batch, _ in getattr(scheduler, "result_queue", ()):
        for request in batch.reqs:
            if request.finished() or request.is_retracted or request.inflight_middle_chunks > 0:
                continue  # its result holds no token for it
            events, count = request.weight_version_events, len(request.output_ids) + 1
            if events and events[-1].old_version == version and events[-1].num_output_tokens == count - 1:
                events.pop()
            events.append(WeightVersionEvent(old_version=version, num_output_tokens=count))


def _stale(model: Any) -> list[str]:
    """MLA's absorbed matrices that are not those of the `kv_b_proj` they are derived from."""
    import torch

    wrong = []
    for name, module in model.named_modules():
        key = module.__dict__.get("w_kc")
        if not isinstance(key, torch.Tensor) or module.kv_b_proj.weight.dtype != key.dtype:
            continue
        heads = module.kv_b_proj.weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
        fresh = heads.split((module.qk_nope_head_dim, module.v_head_dim), dim=1)
        if not (torch.equal(key, fresh[0]) and torch.equal(module.w_vc, fresh[1].transpose(1, 2))):
            wrong.append(name)
    return wrong


def _synchronise() -> None:
    """Work of requests that a pause left in place still reads the weights."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
