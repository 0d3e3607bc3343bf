from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from milepost.errors import ConfigError
from milepost.trainer.reward import load_reward, score_responses


def write(path: Path, code: str) -> Path:
    path.write_text(textwrap.dedent(code))
    return path


class TestLoading:
    def test_default_is_the_additions(self) -> None:
        reward = load_reward(None)
        assert reward("17+5=", "22", "22", level=3) == 1.0

    def test_module_in_the_working_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "my_rewards_zz.py", "def length(prompt, response, ground_truth): return len(response)")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
        assert load_reward("my_rewards_zz:length")("p", "abc", None) == 3

    def test_file_with_arguments_from_config_and_data(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "r.py",
            """
            def scaled(prompt, response, ground_truth, *, scale, level=1, **extra):
                return scale * level + len(extra)
            def named(prompt, response, ground_truth, level=1):
                return level
            """,
        )
        reward = load_reward(f"{path}:scaled", {"scale": 10})
        assert reward("", "", None, level=2, other=0) == 21
        assert reward("", "", None, scale=1, level=2) == 2  # the data's column wins
        assert load_reward(f"{path}:named")("", "", None, level=4, other=0) == 4
        with pytest.raises(ConfigError, match="takes no argument scale"):
            load_reward(f"{path}:named", {"scale": 10})

    @pytest.mark.parametrize(
        "path, words",
        [
            ("no_such_module_zz:f", "cannot import 'no_such_module_zz'"),
            ("math:no_such", "math has no function 'no_such'"),
            ("math:pi", "math has no function 'pi'"),
            ("{dir}/none.py:f", "there is no file"),
            ("{dir}/bad.py:f", "SyntaxError"),
            ("{dir}/two.py:f", "must be callable as f(prompt, response, ground_truth"),
        ],
    )
    def test_refused_by_name(self, tmp_path: Path, path: str, words: str) -> None:
        write(tmp_path / "bad.py", "def f(:")
        write(tmp_path / "two.py", "def f(prompt, response): return 1")
        path = path.format(dir=tmp_path)
        with pytest.raises(ConfigError) as caught:
            load_reward(path)
        assert f"reward.path={path}" in str(caught.value) and words in str(caught.value)


class TestScoring:
    def test_arguments_line_up(self) -> None:
        def reward(prompt: str, response: str, ground_truth: str | None, k: int) -> float:
            return float(f"{prompt}{response}{ground_truth}{k}")

        scores = score_responses(reward, ["1", "5"], ["2", "6"], ["3", "7"], [{"k": 4}, {"k": 8}])
        assert scores == [1234.0, 5678.0]

    @pytest.mark.parametrize("number", [1, 1.0, True, np.float32(1), np.array(1.0), torch.tensor(1.0)])
    def test_any_number_will_do(self, number: object) -> None:
        (score,) = score_responses(lambda *_: number, ["p"], ["r"], [None])  # type: ignore[arg-type,return-value]
        assert score == 1.0 and type(score) is float

    @pytest.mark.parametrize("result", [float("nan"), float("inf"), None, "1", [1.0], torch.tensor(float("nan"))])
    def test_no_number(self, result: object) -> None:
        with pytest.raises(ConfigError, match=r"prompt 17 \('why\?'\): returned .*, not a finite number"):
            score_responses(lambda *_: result, ["why?"], ["r"], [None], numbers=[17])  # type: ignore[arg-type,return-value]

    def test_raising(self) -> None:
        def reward(prompt: str, response: str, ground_truth: str | None) -> float:
            return 1 / len(response)

        with pytest.raises(ConfigError, match=r"prompt 1 \('b'\): raised ZeroDivisionError"):
            score_responses(reward, ["a", "b"], ["x", ""], [None, None])

    def test_leaving_the_process(self) -> None:
        with pytest.raises(ConfigError, match=r"prompt 0 \('a'\): raised SystemExit: 5"):
            score_responses(lambda *_: sys.exit(5), ["a"], ["x"], [None])
