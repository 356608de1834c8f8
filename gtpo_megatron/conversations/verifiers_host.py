"""Plays a taskset of verifiers, in an interpreter that has verifiers and need have nothing of ours.

``python -I FILE JSON``, where JSON has ``mode``, ``taskset`` and ``options``. The first line of standard output is
``{"ready": VERSION}``, or ``{"refused": WHY}`` and nothing more. Then by mode:

``rows``: a line of JSON for each task, and ``{"done": COUNT}``. ``play``: a line of standard input is an episode,
``{"id", "task", "base_url", "api_key"}``, or ``{"cancel": ID}``; each episode is answered once, in any order, with
``{"id", "reward", "parts"}`` or ``{"id", "error"}``.
"""

import asyncio
import json
import math
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version

NEEDED = "0.4"
"""Version of verifiers; two of its names that are not public are used here, ``_headers`` and ``_interception``."""

REASON_CHARACTERS = 500
"""Length to which an error is cut."""

LINE_BYTES = 64 << 20
"""Longest line that is read."""

PART_CHARACTERS = 60
"""Longest name of a part of a reward; a number may be added."""

LATE = ("scoring_timeout", "finalize_timeout")
"""Ends of an episode at which verifiers leaves out the rewards that are late, and calls the episode good."""


class Refused(Exception):
    """What was asked for cannot be had; the text says why."""


def main():
    """Does what the argument asks for."""
    told = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what tasksets print

    def say(**content):
        out.write(json.dumps(content, allow_nan=False) + "\n")
        out.flush()

    try:
        found = _version()
        env, select = _environment(told["taskset"], told["options"])
    except (Exception, SystemExit) as error:
        say(refused=_reason(error))
        return
    player = _Player(env, say)
    try:
        if told["mode"] == "rows":
            say(ready=found)
            count = 0
            for row in _rows(env.taskset, select):
                say(**row, taskset=told["taskset"])
                count += 1
            say(done=count)
        else:
            asyncio.run(player.serve(found))
    except (Exception, SystemExit) as error:
        if player.is_serving:
            raise
        say(refused=_reason(error))


def _version():
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        raise Refused(f"{sys.executable} has no verifiers; install verifiers=={NEEDED}.0 there") from None
    if found.split(".")[:2] != NEEDED.split("."):
        raise Refused(f"{sys.executable} has verifiers {found}; install verifiers=={NEEDED}.0 there")
    return found


def _environment(taskset, options):
    """The environment, and how its tasks are selected; options are as of verifiers' ``--env.``, and ``--select.``."""
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils.loaders import env_config_type, load_environment, taskset_class

    raw = {"taskset": {"id": taskset}}
    for name, text in options.items():
        *outer, last = name.split(".")
        place = raw
        for key in outer:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise Refused(f"option {name}: {key} has a value already")
        place[last] = _value(text)
    select = SelectConfig.model_validate(raw.pop("select", {}))
    raw["interception"] = {"type": "server"}  # the one that all episodes share
    taskset_class(taskset)  # says what is wrong with it; the next line would not
    kind = env_config_type(taskset, raw.get("id", ""))
    for name, field in kind.model_fields.items():
        if isinstance(field.default, AgentConfig) and "runtime" not in field.default.model_fields_set:
            raw.setdefault(name, {}).setdefault("runtime", {}).setdefault("type", "subprocess")  # not Prime's cloud
    env = load_environment(kind.model_validate(raw))
    asking = [name for name, spec in agent_config_fields(env.config).items() if spec.client is None]
    if len(asking) != 1:
        raise Refused(
            f"{', '.join(asking) or 'none'} of its agents would ask the policy, and one must, since an episode has one "
            f"reward; give each other one a model: NAME.client.base_url=..., NAME.model=..."
        )
    return env, select


def _value(text):
    """A value as on verifiers' command line: JSON or text; ``null`` is the name of a harness, and ``None`` is none."""
    try:
        return None if text == "None" else text if text == "null" else json.loads(text)
    except ValueError:
        return text


def _rows(taskset, select):
    """A row for each task: its prompt, its answer if it has one, and all of it as ``task``."""
    view = taskset.select(select)
    if not view.bounded:
        raise Refused("its tasks never end; take some: select.limit=1000")
    for task in view:
        kind = type(task.data)
        defaults = {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}
        named = {field.serialization_alias or field.alias or name: name for name, field in kind.model_fields.items()}
        whole = task.data.model_dump(mode="json", by_alias=True)
        data = {
            key: one
            for key, one in whole.items()
            if getattr(task.data, named.get(key, key)) != defaults.get(named.get(key, key))
        }
        if kind.model_validate(data) != task.data:
            raise Refused(
                f"task {task.data.idx} is another one when it is read again from JSON; see its fields' aliases"
            )
        prompt = data.get("prompt") or task.data.description or task.data.name or f"task {task.data.idx}"
        answer = getattr(task.data, "answer", None)
        yield {"prompt": prompt, **({"answer": answer} if isinstance(answer, str | int | float) else {}), "task": data}


class _Player:
    """Plays episodes side by side."""

    def __init__(self, env, say):
        self.is_serving = False
        self._env = env
        self._say = say
        self._keys = {}  # by trace, the key of its episode
        self._playing = {}

    async def serve(self, found):
        """Says that it is ready, and plays what it is told to, until there is nobody to tell it."""
        lines = asyncio.StreamReader(limit=LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        async with self._env.serving():
            self.is_serving = True
            self._say(ready=found)
            while line := await lines.readline():
                told = json.loads(line)
                if "cancel" in told:
                    if task := self._playing.pop(told["cancel"], None):
                        task.cancel()
                        self._say(id=told["cancel"], error="cancelled")
                else:
                    self._playing[told["id"]] = asyncio.create_task(self._play(**told))

    async def _play(self, id, task, base_url, api_key):
        try:
            answer = await self._played(task, base_url, api_key)
        except Exception as error:
            answer = {"error": _reason(error)}
        if self._playing.pop(id, None):
            try:
                self._say(id=id, **answer)
            except ValueError as error:  # of a number that JSON has not
                self._say(id=id, error=_reason(error))

    async def _played(self, data, base_url, api_key):
        from verifiers.v1.clients import ModelContext

        env = self._env
        kind = type(env.taskset).task_type()
        fields = kind.data_type().model_fields
        known = {*fields, *(field.alias for field in fields.values())}
        if kind.data_type().model_config.get("extra") != "allow" and (unknown := sorted(data.keys() - known)):
            raise Refused(f"the row's task has {', '.join(unknown)}, which this taskset's tasks have not")
        task = kind(kind.data_type().model_validate(data), env.config.taskset.task)
        (slot,) = env.slots(task)
        ids = []

        def minted(trace):
            ids.append(trace.id)
            self._keys[trace.id] = api_key

        try:
            context = ModelContext(model="policy", client=self._client_config(base_url))
            episode = await env.run_slot(slot, context, on_trace=minted)
        finally:
            for one in ids:
                del self._keys[one]
        return _outcome(episode)

    def _client_config(self, base_url):
        """What verifiers calls a client: one for all episodes, as each that is made has memory until the end."""
        from verifiers.v1.clients import EvalClient, EvalClientConfig

        keys = self._keys

        class Client(EvalClient):
            """Asks with the key of the episode that a trace is of."""

            def _headers(self, dialect, incoming, session_id):
                headers = super()._headers(dialect, incoming, session_id)
                headers.update(dialect.auth_headers(keys.get(session_id, "")))
                return headers

        config = EvalClientConfig(base_url=base_url, api_key_var="GTPO_NO_API_KEY")
        known, name = self._env._interception.clients, config.model_dump_json()
        if name not in known:
            known[name] = Client(config)
        return config


def _outcome(episode):
    """Reward and parts of an episode, or its error."""
    failed = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    if not episode.ok:
        error = failed[-1]
        sys.stderr.write(f"{error.traceback or ''}\n")
        return {"error": _reason(f"{error.type}: {error.message}")}
    asking = [trace for trace in episode.traces if trace.agent.config.client.api_key_var == "GTPO_NO_API_KEY"]
    if len(asking) != 1:
        return {"error": f"the policy was played {len(asking)} times in one episode"}
    (trace,) = asking
    missing = [name for name, one in trace.rewards.items() if one is None]
    if missing or trace.stop_condition in LATE:
        return {"error": f"it was not graded: {', '.join(missing) or 'its rewards'} took too long"}
    values = [(name, one.value) for name, one in trace.rewards.items()]
    values += [(name, one) for name, one in trace.metrics.items() if one is not None]
    parts = {}
    for name, value in (*values, ("reward", trace.reward)):
        if not math.isfinite(value):
            return {"error": f"{name} is {value}"}
    for name, value in values:
        label, same = _label(name), 1
        while label in parts:
            same += 1
            label = f"{_label(name)}_{same}"
        parts[label] = value
    return {"reward": trace.reward, "parts": parts}


def _label(name):
    """A name as parts of rewards have them."""
    label = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return (label if label[:1].isalpha() else f"part_{label}")[:PART_CHARACTERS]


def _reason(error):
    """An error in one line."""
    text = str(error) if isinstance(error, str | Refused) else f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    return text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]}..."


if __name__ == "__main__":
    main()
