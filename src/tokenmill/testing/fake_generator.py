"""Engines that invent tokens. Owns: FakeLink (one engine's life behind the Link seam) and a loaded fleet of them.

A token is a function of the request's seed, the output's index and the position, so that a replayed request must go
on with exactly the same text. No torch, no processes: for tests of the server, and for measuring what it costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from tokenmill.core.config import AdapterOptions
from tokenmill.core.request import Request, TokenDelta
from tokenmill.core.sleeping import TAGS, Slept
from tokenmill.core.step import RowLogprobs
from tokenmill.engine.running.wire import Abort, Adapt, Add, Command, News, Ready, Refused, Report, Sleep, Wake
from tokenmill.process.vitals import Vitals
from tokenmill.server.adapters import AdapterBook
from tokenmill.server.backend import EngineStats
from tokenmill.server.engines.fleet import Fleet
from tokenmill.server.engines.state import FleetOptions
from tokenmill.text.codec import Tokenizer, TokenizerSettings

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz "
HIDDEN = 8
FILLS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
"""Words of a model that fills gaps."""


def byte_tokenizer(words: Sequence[str] = ()) -> Tokenizer:
    """One token per byte, the three control tokens of a chat template, and these words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    inner.add_tokens([AddedToken(word, normalized=False) for word in words])
    return Tokenizer(inner, TokenizerSettings({"eos_token": "<|im_end|>"}, TEMPLATE))


@dataclass(slots=True)
class FakeWork:
    """A request that a fake engine works on; `said[i]` are the tokens of output i, `script` what they are to be."""

    request: Request
    pooling: str | None
    said: list[list[int]]
    ended: set[int]
    script: list[int] = field(default_factory=list)
    started: bool = False


@dataclass
class FakeOptions:
    """How a fake engine behaves; may be changed while it runs. With `script` every answer says just that."""

    step_s: float = 0.0
    max_rows: int = 256
    max_model_len: int = 4096
    hung: bool = False
    script: str = ""
    facts: dict[str, object] = field(default_factory=dict)
    """More that it says of itself."""
    restless: str = ""
    """Why it neither sleeps nor wakes."""
    tokenizer: Tokenizer = field(default_factory=lambda: byte_tokenizer(FILLS))
    blind: bool = False
    """The engine has its tokenizer for itself."""


class FakeLink:
    """One life of a fake engine. `die` ends it as a crash would."""

    def __init__(self, options: FakeOptions) -> None:
        self.options = options
        self.letters = [options.tokenizer.encode(c, add_special_tokens=False)[0] for c in LETTERS]
        self.works: dict[str, FakeWork] = {}
        self.commands: list[Command] = []
        self.task: asyncio.Task[None] | None = None
        self.on_death: Callable[[str], None] = lambda reason: None
        self.steps = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.asleep: list[str] = []

    def start(self, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None:
        self.on_death = on_death
        self.task = asyncio.get_running_loop().create_task(self._take_steps(on_news))

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def vitals(self) -> Vitals | None:
        """There is no process."""
        return None

    def dump_stacks(self) -> None:
        """Nothing to show."""

    async def kill(self) -> None:
        self.die("killed")

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task

    def die(self, reason: str = "signal 9") -> None:
        """Crash now: what has not been reported is lost."""
        if self.task is not None:
            self.task.cancel()
        self.works.clear()
        asyncio.get_running_loop().call_soon(self.on_death, reason)

    async def _take_steps(self, on_news: Callable[[News], None]) -> None:
        on_news(self._ready())
        while True:
            await asyncio.sleep(self.options.step_s if self.works or self.commands else max(self.options.step_s, 0.001))
            if not self.options.hung:
                on_news(self._step())

    def _ready(self) -> Ready:
        options = self.options
        facts = {
            "root": "fake",
            "vocab_size": options.tokenizer.vocab_size,
            "max_model_len": options.max_model_len,
            "max_rows": options.max_rows,
            "priorities": False,
            "device": "fake",
            **options.facts,
        }
        shown = None if options.blind else options.tokenizer.state()
        return Ready(facts=facts, eos_ids=[258], generation={}, tokenizer=shown)

    def _step(self) -> Report:
        report = Report()
        commands, self.commands = self.commands, []
        for command in commands:
            if isinstance(command, Add):
                self._add(command, report)
            elif isinstance(command, Abort):
                self._abort(command)
            elif isinstance(command, Adapt) and command.path is not None:
                report.adapted[command.number] = ""
            elif isinstance(command, Sleep | Wake):
                report.slept = self._rest(command)
        running = list(itertools.islice(self.works.values(), self.options.max_rows))
        for work in running:
            if not work.started:
                work.started = True
                report.started[work.request.id] = 0.0
                report.prefilled[work.request.id] = len(work.request.prompt_ids)
                self.prompt_tokens += len(work.request.prompt_ids) - work.request.reached
            self._advance(work, report)
        self.steps += bool(running)
        report.tokens = len(report.deltas)
        report.stats = EngineStats(
            running=len(running),
            waiting=len(self.works) - len(running),
            kv_usage=min(1.0, len(self.works) / self.options.max_rows),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            steps=self.steps,
        )
        for work in running:
            if len(work.ended) == len(work.said):
                self.works.pop(work.request.id, None)
        return report

    def _rest(self, command: Sleep | Wake) -> Slept:
        """It sleeps, if it is told and nothing is open."""
        assert not self.works, "engines are told to sleep between requests"
        if self.options.restless:
            return Slept(list(self.asleep), error=self.options.restless)
        gone = TAGS if isinstance(command, Sleep) else [tag for tag in self.asleep if tag not in command.tags]
        self.asleep = list(gone)
        return Slept(self.asleep, kept=7 if isinstance(command, Sleep) and command.level == 1 else 0)

    def _add(self, command: Add, report: Report) -> None:
        assert not self.asleep, "a sleeping engine gets no requests"
        request = command.request
        wanted = request.params.structured_outputs
        if wanted is not None and not (set(wanted) == {"choice"} and wanted["choice"]):
            text = "this engine enforces choice only"
            report.refused.append(Refused(request.id, text, "structured_outputs"))
            return
        if command.ack:
            report.accepted.append(request.id)
        said = [list(tokens) for tokens in request.emitted] or [[] for _ in range(request.params.num_sequences)]
        script = self.options.tokenizer.encode(self.options.script, add_special_tokens=False)
        self.works[request.id] = FakeWork(request, command.pooling, said, set(request.ended), script)

    def _abort(self, command: Abort) -> None:
        work = self.works.get(command.request_id)
        if work is not None:
            work.ended.update(range(len(work.said)) if command.index is None else [command.index])
            if len(work.ended) == len(work.said):
                del self.works[command.request_id]

    def _advance(self, work: FakeWork, report: Report) -> None:
        request = work.request
        if work.pooling is not None:
            vector = [1.0 / HIDDEN**0.5] * HIDDEN
            report.deltas.append(TokenDelta(request.id, 0, [], finish="stop", pooled=vector))
            work.ended.add(0)
            return
        params = request.params
        most = params.max_tokens or self.options.max_model_len - len(request.prompt_ids)
        if params.prompt_logprobs is not None and not any(work.said):
            rows = [RowLogprobs([t], [-1.0], 1) for t in request.prompt_ids[1:]]
            report.deltas.append(TokenDelta(request.id, 0, [], prompt_logprobs=rows))
        for index, said in enumerate(work.said):
            if index in work.ended:
                continue
            token = work.script[len(said)] if work.script else self._token(request, index, len(said))
            said.append(token)
            self.output_tokens += 1
            scored = [self._row(token, params.logprobs)] if params.logprobs is not None else None
            finish = "length" if len(said) >= most else "stop" if len(said) == len(work.script) else None
            report.deltas.append(TokenDelta(request.id, index, [token], scored, finish))
            if finish is not None:
                work.ended.add(index)

    def _token(self, request: Request, index: int, position: int) -> int:
        mixed = (request.seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9 + position * 0x94D049BB133111EB) % 2**64
        return self.letters[(mixed >> 29) % len(self.letters)]

    def _row(self, token: int, count: int) -> RowLogprobs:
        others = [t for t in self.letters if t != token][: max(0, count - 1)]
        ids = [token, token, *others] if count else [token]
        return RowLogprobs(ids, [-0.5, -0.5, *(-2.0 - i for i in range(len(others)))][: len(ids)], 1)


@dataclass
class FakeFleet:
    """A fleet and the links that it has made so far, by (engine, life)."""

    fleet: Fleet
    links: dict[tuple[int, int], FakeLink]

    def link(self, engine: int = 0) -> FakeLink:
        """The link of an engine's present life."""
        return self.links[max(key for key in self.links if key[0] == engine)]


async def fake_fleet(options: FakeOptions | None = None, fleet_options: FleetOptions | None = None) -> FakeFleet:
    """A loaded fleet of fake engines that serves the model `fake`."""
    options = options or FakeOptions()
    links: dict[tuple[int, int], FakeLink] = {}

    def make(number: int, life: int) -> FakeLink:
        links[number, life] = FakeLink(options)
        return links[number, life]

    fleet = Fleet(make, ("fake", "other"), fleet_options or FleetOptions())
    fleet.adapters.book = AdapterBook(AdapterOptions(enable_lora=True), fleet.names)
    await fleet.start()
    return FakeFleet(fleet, links)
