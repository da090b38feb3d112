"""`vidgen generate`: a video file from a sentence, in steps that survive being stopped."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vidgen.cli.loading import load_pipeline
from vidgen.runtime.assets import find_asset
from vidgen.runtime.errors import VidgenError

if TYPE_CHECKING:
    from vidgen.data.video_writer import VideoClaim
    from vidgen.pipelines import ContextForcingPipeline, GenerationSession

INTERRUPTED = 130
SESSION_SUFFIX = ".session.safetensors"
# By how much the longest file beside a video has the longer name: the session while `atomic_write` makes it.
LONGEST_ADDITION = len(SESSION_SUFFIX) + len("..12345678.tmp")
DEFAULT_OUTPUT = Path("video.mp4")
DEFAULT_SECONDS = 10.0
# Below this many lines a video is enlarged, so that a tiny model's frames can be watched.
MIN_DISPLAY_HEIGHT = 256


class OutputError(VidgenError):
    """The output can't be written where it was asked for."""


def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="What to show.")] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts in order: lines `SECONDS IT LASTS | PROMPT` (.txt), or .jsonl."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Length. Default: the plan's, else 10. At most 10 million frames.")
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Length in frames, instead of --seconds.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="An .mp4 file, or `-` for raw rgb24 on stdout. Default: video.mp4."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Pipeline folder, or owner/name on the Hub. Default: the embedded model."),
    ] = None,
    image: Annotated[Path | None, typer.Option(metavar="FILE", help="Picture the video begins with.")] = None,
    video: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Video to continue; the length includes it.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same video. Default: drawn, and printed.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels. Default: the model's.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels. Default: the model's.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second, of file and plan.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps per chunk. Default: the model's.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Classifier-free guidance scale; 1 is off.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="NAME", help="slow_fast (default), sliding_window or full.")
    ] = None,
    memory_option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Setting of the memory, as slow=12. May be repeated.")
    ] = None,
    prompt_switch: Annotated[
        str | None, typer.Option(metavar="MODE", help="Memory at a change of prompt: recache, keep or flush.")
    ] = None,
    scale: Annotated[
        int | None, typer.Option(help="Enlarge frames in the file, 1 to 64 times. Default: to at least 256 lines.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print a line per chunk instead of a bar.")] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="SESSION", help="Go on with a stopped run's .session.safetensors file.")
    ] = None,
    session_every: Annotated[
        int, typer.Option(metavar="CHUNKS", help="How often to save the session; 0: only on Ctrl-C.")
    ] = 10,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or mps. Default: the best there is.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the device's.")] = None,
    attention: Annotated[
        str | None, typer.Option(metavar="BACKEND", help="Kernel; `vidgen doctor` lists them.")
    ] = None,
    compile_blocks: Annotated[bool, typer.Option("--compile", help="Compile the transformer blocks (GPU).")] = False,
    max_memory_gb: Annotated[
        float | None,
        typer.Option(metavar="GB", help="Refuse to start if more is needed (in 10^9 bytes)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output, or a stopped run.")] = False,
) -> None:
    """Generate a video from a sentence or a plan.

    Ctrl-C saves the session; `--resume` continues it with the same frames an uninterrupted run would have made.
    """
    settings = {
        "seed": seed, "seconds": seconds, "frames": frames, "height": height, "width": width, "fps": fps,
        "steps": steps, "guidance": guidance, "memory": memory, "memory-option": memory_option,
        "prompt-switch": prompt_switch, "image": image, "video": video, "plan": plan, "max-memory-gb": max_memory_gb,
    }  # fmt: skip
    _check_arguments(prompt, resume, settings, session_every, scale)
    output = _choose_output(output, resume)
    again = ["vidgen", "generate", "--resume", f"{output}{SESSION_SUFFIX}", "-o", str(output)]
    same = {"--model": model, "--scale": scale, "--device": device, "--dtype": dtype, "--attention": attention}
    for option, value in same.items():
        again += [option, str(value)] if value is not None else []
    to_stdout = str(output) == "-"

    with nullcontext() if to_stdout else claim_output(output, force, resuming=resume is not None) as claim:
        from vidgen.pipelines import ContextForcingPipeline

        pipe = load_pipeline(ContextForcingPipeline, model or find_asset(), device, dtype, attention, compile_blocks)
        if resume is not None:
            from vidgen.pipelines import GenerationSession

            session = GenerationSession.load(resume, pipe)
        else:
            session = _start_session(pipe, prompt, settings)
        _print_budget(session)

        reporter = _Reporter(session, stream=stream and not to_stdout)
        with _stop_on_signal(session) as stop, reporter:
            if to_stdout:
                _write_raw(session, stop, reporter)
            else:
                _write_video(session, claim, scale, resume is not None, session_every, stop, reporter)
    if not session.finished:
        if not to_stdout:
            print(
                f"stopped after {session.num_frames_emitted} frames; go on with: {shlex.join(again)}", file=sys.stderr
            )
        raise typer.Exit(INTERRUPTED)
    print(f"{output}: {session.num_frames_emitted} frames, {reporter.rate()}", file=sys.stderr)
    _print_memory(session)


# --- before any work ------------------------------------------------------------------------------------------


def _check_arguments(
    prompt: str | None, resume: Path | None, settings: dict[str, Any], session_every: int, scale: int | None
) -> None:
    given = [f"--{name}" for name, value in settings.items() if value not in (None, [])]
    if resume is not None:
        given = ["PROMPT"] * (prompt is not None) + given
        if given:
            raise typer.BadParameter(f"--resume keeps the stopped run's settings; leave out {', '.join(given)}")
        if not resume.is_file():
            raise typer.BadParameter(f"--resume {resume} is not a file; a stopped run leaves OUTPUT{SESSION_SUFFIX}")
    elif (prompt is None) == (settings["plan"] is None):
        raise typer.BadParameter('give either a PROMPT, such as "a meadow at dawn", or --plan FILE')
    if prompt is not None and not prompt.strip():
        raise typer.BadParameter('the PROMPT is empty; say what to show, such as "a meadow at dawn"')
    for one, other in (("seconds", "frames"), ("image", "video")):
        if settings[one] is not None and settings[other] is not None:
            raise typer.BadParameter(f"--{one} and --{other} exclude each other; give one of them")
    for name in ("seconds", "frames", "height", "width", "fps", "steps", "max-memory-gb"):
        value = settings[name]
        if value is not None and not 0 < value < float("inf"):
            raise typer.BadParameter(f"--{name} {value:g} must be above 0")
    if settings["seed"] is not None and not 0 <= settings["seed"] < 1 << 63:
        raise typer.BadParameter(f"--seed {settings['seed']} must be from 0 to {(1 << 63) - 1}")
    if scale is not None and not 1 <= scale <= 64:
        raise typer.BadParameter(f"--scale {scale} must be from 1 to 64")
    if settings["image"] is not None and settings["frames"] == 1:
        raise typer.BadParameter("--frames 1 leaves nothing to generate: the --image is the first frame")
    for name in ("image", "video", "plan"):
        if settings[name] is not None and not settings[name].is_file():
            raise typer.BadParameter(f"--{name} {settings[name]} is not a file")
    if session_every < 0:
        raise typer.BadParameter(f"--session-every {session_every} must be 0 or more chunks")


def _choose_output(output: Path | None, resume: Path | None) -> Path:
    if resume is not None:
        if output is None and not resume.name.endswith(f".mp4{SESSION_SUFFIX}"):
            raise typer.BadParameter(f"{resume.name} doesn't say which video it belongs to; add -o VIDEO.mp4")
        if str(output) == "-":
            raise typer.BadParameter("a session continues a file, not stdout; give -o VIDEO.mp4")
        return output or resume.with_name(resume.name.removesuffix(SESSION_SUFFIX))
    if output is not None and output.name == "":
        raise typer.BadParameter(f"--output names no file; give one, such as {DEFAULT_OUTPUT}")
    return output or DEFAULT_OUTPUT


@contextmanager
def claim_output(output: Path, force: bool, resuming: bool) -> Iterator[VideoClaim]:
    """Makes sure, before models are loaded, that a video can be written, and keeps other runs from its name.

    Args:
        output: The video's final name.
        force: Whether an existing video or a stopped run's files may be replaced.
        resuming: Whether those files are going to be continued.

    Yields:
        The claim, for a `VideoWriter`.

    Raises:
        OutputError: The name isn't an .mp4 in a writable folder, or is taken.
        VideoWriteError: Another run is writing it, or the disk is full.
    """
    if output.suffix.lower() != ".mp4":
        better = DEFAULT_OUTPUT if output.name.startswith(".") else output.with_suffix(".mp4")
        raise OutputError(f"output {output} must end in .mp4, as {better}")
    try:
        if not output.parent.is_dir():
            raise OutputError(f"folder {output.parent} doesn't exist; create it or choose another --output")
        longest = os.pathconf(output.parent, "PC_NAME_MAX") - LONGEST_ADDITION
        if len(os.fsencode(output.name)) > longest:
            raise OutputError(
                f"the name of --output has {len(os.fsencode(output.name))} bytes; allowed: at most {longest}, because "
                f"the files of a stopped run have longer ones. Choose a shorter name than {output.name:.20}…"
            )
        if output.is_dir():
            raise OutputError(f"output {output} is a folder; give the name of a file in it")
    except OSError as error:
        raise OutputError(f"can't write --output {output}: {error.strerror}; choose another one") from error
    try:
        with tempfile.TemporaryFile(dir=output.parent):  # permission bits don't tell about read-only file systems
            pass
    except OSError as error:
        raise OutputError(f"can't write in folder {output.parent.absolute()}: {error.strerror}") from error

    from vidgen.data.video_writer import VideoClaim

    with VideoClaim(output) as claim:
        # Looked at under the claim: before, a run that is about to finish could still make these files.
        session_file = output.with_name(output.name + SESSION_SUFFIX)
        if output.exists() and not force:
            raise OutputError(f"{output} exists; choose another --output, or add --force to replace it")
        if session_file.exists() and not (force or resuming):
            raise OutputError(f"{output} has a stopped run; continue it with --resume {session_file}, or add --force")
        yield claim


# --- the session ----------------------------------------------------------------------------------------------


def _start_session(pipe: ContextForcingPipeline, prompt: str | None, settings: dict[str, Any]) -> GenerationSession:
    import torch

    from vidgen.pipelines import PromptPlan

    prompt_plan = PromptPlan.parse(prompt if settings["plan"] is None else settings["plan"])
    seed = settings["seed"]
    if seed is None:
        seed = secrets.randbits(31)
        print(f"seed {seed}", file=sys.stderr)
    if settings["fps"] is not None:
        pipe.register_to_config(fps=settings["fps"])
    seconds = settings["seconds"]
    if settings["frames"] is None and seconds is None:
        seconds = prompt_plan.seconds or DEFAULT_SECONDS
    given = {
        "num_frames": settings["frames"],
        "seconds": seconds,
        "height": settings["height"],
        "width": settings["width"],
        "num_inference_steps": settings["steps"],
        "guidance_scale": settings["guidance"],
        "prompt_switch": settings["prompt-switch"],
        "max_memory_gb": settings["max-memory-gb"],
        "memory": _memory_config(settings["memory"] or "slow_fast", settings["memory-option"]),
        "image": None if settings["image"] is None else _read_image(settings["image"]),
        "video": None if settings["video"] is None else _read_video(settings["video"]),
    }
    return pipe.session(
        prompt_plan,
        generator=torch.Generator().manual_seed(seed),
        undo_depth=0,  # nobody can ask for it here, and it costs memory
        **{name: value for name, value in given.items() if value is not None},
    )


def _memory_config(name: str, options: list[str] | None) -> Any:
    import yaml

    from vidgen.memory import make_memory

    values = {}
    for option in options or ():
        key, separator, value = option.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"--memory-option {option!r} is not KEY=VALUE, such as slow=12")
        values[key.strip()] = yaml.safe_load(value)
    return make_memory(name, **values).config if values else name


def _read_image(path: Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as error:
        raise VidgenError(f"--image {path} can't be read as a picture: {error}") from error


def _read_video(path: Path) -> Any:
    from vidgen.data import VideoReader

    reader = VideoReader(path)
    return reader[0 : len(reader)]


def _print_budget(session: GenerationSession) -> None:
    from vidgen.pipelines.budget import estimate_budget, format_bytes

    budget = estimate_budget(session.pipe, session.memory, session.settings, session.batch_size)
    settings = session.settings
    print(
        f"{settings.num_frames} frames of {settings.height}x{settings.width}, "
        f"{settings.num_frames / settings.fps:,.1f} s at {settings.fps:g} frames/s; estimated: "
        f"models {format_bytes(budget.weights)}, memory {format_bytes(budget.key_values)}, "
        f"decoder {format_bytes(budget.decoder)}",
        file=sys.stderr,
    )


def _print_memory(session: GenerationSession) -> None:
    """What a slow-fast memory took in; where that was nothing, what to change."""
    from vidgen.memory import SlowFastMemory

    memory = session.memory
    if not isinstance(memory, SlowFastMemory) or not memory.num_decisions:
        return
    statistics, config = memory.statistics(), memory.config
    seconds = session.pipe.vae_scale_factor_temporal / session.settings.fps
    ages = (memory.num_frames - memory.frame_ids[:, config.sink : config.sink + config.slow]) * seconds
    quantiles = statistics["similarity_quantiles"]
    print(
        f"memory: {memory.num_promotions} of {memory.num_decisions} frames judged were new enough to keep; kept "
        f"frames are {int(ages.min())} to {int(ages.max())} s old; similarity {quantiles['0.05']:.2f} to "
        f"{quantiles['0.95']:.2f}, half below {statistics['suggested_tau']:.3f}, tau {config.tau:g}",
        file=sys.stderr,
    )
    if memory.num_decisions >= config.slow and not memory.num_promotions:
        print(
            "warning: the slow memory still holds the opening alone, so what came after it is forgotten; "
            f"--memory-option tau={statistics['suggested_tau']:.3f} would keep about half of the frames judged.",
            file=sys.stderr,
        )


# --- writing --------------------------------------------------------------------------------------------------


class _Unfinished(Exception):
    """Leaves a `VideoWriter` block without publishing the video."""


class _Stop:
    """Whether the user asked to stop."""

    requested = False


@contextmanager
def _stop_on_signal(session: GenerationSession) -> Iterator[_Stop]:
    """Turns Ctrl-C and SIGTERM into a stop between chunks; a second one ends the process at once."""
    stop = _Stop()

    def handle(signal_number: int, frame: Any) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        session.interrupt()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Reporter:
    """Shows progress on stderr: a bar with rate and time left, or with `stream` a line per chunk on stdout."""

    def __init__(self, session: GenerationSession, stream: bool) -> None:
        self.session = session
        self.stream = stream
        self.first_frame = session.num_frames_emitted
        self.started = self.last = time.monotonic()
        self.progress = self.task = None

    def __enter__(self) -> _Reporter:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        if not self.stream:
            columns = (
                TextColumn("generating"), BarColumn(), TextColumn("{task.completed}/{task.total} frames"),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[rate]}"),
            )  # fmt: skip
            self.progress = Progress(*columns, console=Console(stderr=True))
            total = self.session.settings.num_frames
            self.task = self.progress.add_task("", total=total, completed=self.first_frame, rate="")
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def chunk_done(self, num_frames: int) -> None:
        """Reports a chunk of `num_frames` frames that is safely in the file."""
        now = time.monotonic()
        done = self.session.num_frames_emitted
        if self.stream:
            seconds = now - self.last
            print(
                f"chunk {self.session.chunk_index - 1}: frames {done - num_frames}-{done - 1}, {seconds:.2f} s, "
                f"{num_frames / seconds:.1f} frames/s, memory {self.session.memory.nbytes} bytes",
                flush=True,
            )
        else:
            self.progress.update(self.task, completed=done, rate=self.rate())
        self.last = now

    def rate(self) -> str:
        """Speed since the start, as frames per second and as a multiple of playing speed."""
        from vidgen.pipelines.budget import format_bytes

        rate = (self.session.num_frames_emitted - self.first_frame) / max(time.monotonic() - self.started, 1e-9)
        realtime = rate / self.session.settings.fps
        return f"{rate:.1f} frames/s, {realtime:.2f}x real time, memory {format_bytes(self.session.memory.nbytes)}"


def _write_raw(session: GenerationSession, stop: _Stop, reporter: _Reporter) -> None:
    """Writes frames to stdout as they come, rgb24 without any header."""
    sys.stderr.write(f"rgb24 {session.settings.width}x{session.settings.height} at {session.settings.fps:g} fps\n")
    while not (session.finished or stop.requested):
        frames = session.step()
        if frames is not None:
            sys.stdout.buffer.write(frames.tobytes())
            sys.stdout.buffer.flush()
            reporter.chunk_done(len(frames))


def _write_video(
    session: GenerationSession,
    claim: VideoClaim,
    scale: int | None,
    resuming: bool,
    session_every: int,
    stop: _Stop,
    reporter: _Reporter,
) -> None:
    """Writes the video chunk by chunk; if it isn't finished, leaves a session file that fits the partial video."""
    from vidgen.data import VideoWriter
    from vidgen.pipelines import GenerationError

    session_file = claim.path.with_name(claim.path.name + SESSION_SUFFIX)
    settings = session.settings
    if scale is None:
        scale = max(1, -(-MIN_DISPLAY_HEIGHT // settings.height))
    writer = VideoWriter(
        claim,
        fps=settings.fps,
        height=settings.height,
        width=settings.width,
        scale=scale,
        resume_frames=session.num_frames_emitted if resuming else 0,
    )
    if not resuming:
        session_file.unlink(missing_ok=True)  # of a run that --force gives up
    with suppress(_Unfinished), writer:
        while not (session.finished or stop.requested):
            try:
                frames = session.step()
            except GenerationError:
                session.save(session_file)  # at its last whole chunk
                raise
            if frames is None:
                break
            writer.append(frames)
            reporter.chunk_done(len(frames))
            if session_every and session.chunk_index % session_every == 0:
                session.save(session_file)
        if not session.finished:
            session.save(session_file)
            raise _Unfinished
    if session.finished:
        session_file.unlink(missing_ok=True)
