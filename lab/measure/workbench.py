"""The instruments of a build: texts that a model writes, the probe, the times of steps.

Most builds need none of them, so what they import is imported when they run.
"""

import logging
import shutil
from pathlib import Path

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.runtime.contract.manifest import MANIFEST, Manifest, read_manifest
from mtpbuild.runtime.errors import BuildError

TEXTS = "texts.jsonl"

logger = logging.getLogger(__name__)


class EngineWorkbench:
    """A `Workbench` (builder/compiler/workbench.py) that loads the engines in this process."""

    def write_texts(
        self, request: BuildRequest, prompts: Path | None, folder: Path, stages: Stages
    ) -> list[list[int]]:
        """Return the texts of `folder`; if it has none, build an engine that writes them."""
        from mtpbuild.lab.measure.own_texts import read_answers, write_calibration_texts

        path = folder / TEXTS
        if not path.is_file():
            assert request.out is not None
            with stages("write texts"):
                build(request, self, Stages(lambda stage: stages.watch(f"write texts: {stage}")))
                write_calibration_texts(request.out, prompts, path, stages.watch)
            shutil.rmtree(request.out, ignore_errors=True)
        return [answer.prompt + answer.answer for answer in read_answers(path)]

    def finish(self, folder: Path, name: str, stages: Stages, *, exact: bool) -> None:
        """Probe an engine that may be exact; time the steps of an adaptive one."""
        manifest = read_manifest(folder)
        if manifest.split:
            return
        if manifest.build.exact is None:
            with stages("probe"):
                record_probe(folder, name, manifest, exact=exact)
        if manifest.build.adaptive:
            with stages("time steps"):  # so that the first load on this machine need not
                time_steps(folder, manifest)


WORKBENCH = EngineWorkbench()


def time_steps(folder: Path, manifest: Manifest) -> None:
    """Time the steps of an adaptive engine on this machine, into the user's cache."""
    from mtpbuild.runtime.engine.step_times import BUILD_SECONDS, open_step_times
    from mtpbuild.runtime.programs import load_programs

    open_step_times(load_programs(folder, manifest), manifest, None, BUILD_SECONDS)


def record_probe(folder: Path, name: str, manifest: Manifest, *, exact: bool) -> None:
    """Probe whether an engine is exact; write the result, or raise BuildError if it must be."""
    from mtpbuild.lab.measure.checks import probe

    result = probe(folder)
    if result.wrong is not None:
        if exact:
            raise BuildError(f"--exact: {name}: {result.wrong}")
        logger.warning("note: %s is not exact: %s", name, result.wrong)
    seen = {"exact": result.wrong is None, "probed": result.checked}
    probed = manifest.model_copy(update={"build": manifest.build.model_copy(update=seen)})
    (folder / MANIFEST).write_text(probed.to_json(), encoding="utf-8")
