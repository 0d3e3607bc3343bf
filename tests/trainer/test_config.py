from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from milepost.errors import ConfigError, NotFoundError
from milepost.trainer.config import config_yaml, describe, json_schema, load_config, render_yaml
from milepost.trainer.embedded import EMBEDDED
from milepost.trainer.fields import config_keys

ROOT = Path(__file__).parents[2]
JOINT = ["trainer.joint_engine=true", "actor_rollout_ref.actor.strategy=deepspeed"]


def refusal(*overrides: str, file: Path | None = None) -> str:
    """The message with which the overrides are refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(
        "trainer:\n  project_name: theirs\n  seed: 7\n  logger: console\n"
        "actor_rollout_ref:\n  actor: {strategy: fsdp, optim: {lr: 1e-5}}\ncritic:\n"
    )
    return path


class TestMerging:
    def test_file_over_default_and_override_over_file(self, yaml_file: Path) -> None:
        config = load_config(yaml_file, ["trainer.seed=8", "trainer.seed=9"])
        assert config.trainer.seed == 9
        assert config.trainer.project_name == "theirs"
        assert config.trainer.total_epochs == 30
        assert config.actor_rollout_ref.actor.optim.lr == 1e-5

    def test_both_suffixes_of_yaml_find_the_file(self, yaml_file: Path, tmp_path: Path) -> None:
        assert load_config(yaml_file.with_suffix(".yml")) == load_config(yaml_file)
        other = tmp_path / "other.yml"
        other.write_text("trainer: {seed: 8}\n")
        assert load_config(other.with_suffix(".yaml")).trainer.seed == 8
        other.with_suffix(".yaml").write_text("trainer: {seed: 9}\n")  # the name itself goes first
        assert (load_config(other).trainer.seed, load_config(other.with_suffix(".yaml")).trainer.seed) == (8, 9)
        with pytest.raises(NotFoundError, match=r"no\.yml does not exist"):
            load_config(tmp_path / "no.yml")

    def test_interpolation(self) -> None:
        config = load_config(None, ["trainer.project_name=p", "trainer.experiment_name=1e3"])
        assert config.trainer.default_local_dir == "checkpoints/p/1e3"
        assert config.task.base_model_dir == "checkpoints/p/1e3/base_model"

    def test_critic_follows_actor_until_it_is_set(self) -> None:
        sizes = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
        assert load_config(None, sizes).critic.ppo_mini_batch_size == 32
        assert load_config(None, [*sizes, "critic.ppo_mini_batch_size=16"]).critic.ppo_mini_batch_size == 16

    def test_the_critics_zero_follows_the_actors(self) -> None:
        config = load_config(None, [*JOINT, "actor_rollout_ref.actor.deepspeed_config.zero_stage=2"])
        assert config.critic.strategy == "deepspeed" and config.critic.deepspeed_config.zero_stage == 2
        assert config.critic.deepspeed_config.dtype == "fp32"  # of the embedded run
        inner = "actor_rollout_ref.actor.deepspeed_config.ds_config.zero_optimization.sub_group_size=7"
        config = load_config(None, [inner, "actor_rollout_ref.model.path=/models/m"])
        assert config.critic.deepspeed_config.ds_config == {"zero_optimization": {"sub_group_size": 7}}
        assert config.critic.deepspeed_config.dtype == "bf16"

    def test_interpolation_from_the_environment_is_typed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MILEPOST_TEST_LR", "2e-5")
        config = load_config(None, ["critic.optim.lr=${oc.env:MILEPOST_TEST_LR}"])
        assert config.critic.optim.lr == 2e-5

    def test_plus_signs_set_and_tilde_gives_the_default_back(self, yaml_file: Path) -> None:
        config = load_config(yaml_file, ["+trainer.nnodes=2", "++trainer.save_freq=3", "~trainer.seed"])
        assert (config.trainer.nnodes, config.trainer.save_freq, config.trainer.seed) == (2, 3, 1)
        assert load_config(yaml_file, ["~trainer"]).trainer.project_name == "milepost"

    def test_tilde_with_a_value_needs_that_value(self, yaml_file: Path) -> None:
        assert load_config(yaml_file, ["~trainer.seed=7"]).trainer.seed == 1
        assert "trainer.seed is 7, not 8" in refusal("~trainer.seed=8", file=yaml_file)

    def test_lists_null_and_quoted_text(self) -> None:
        config = load_config(
            None,
            ["data.train_files=[a.jsonl,'b c.parquet']", "trainer.total_training_steps=null", "reward.path='m:f'"],
        )
        assert config.data.train_files == ["a.jsonl", "b c.parquet"]
        assert config.trainer.total_training_steps is None
        assert config.reward.path == "m:f"

    def test_one_text_is_a_list_of_one(self) -> None:
        assert load_config(None, ["data.train_files=a.jsonl"]).data.train_files == ["a.jsonl"]

    def test_a_section_at_once(self) -> None:
        config = load_config(None, ["algorithm.kl_ctrl={type:adaptive,target_kl:0.02}"])
        assert (config.algorithm.kl_ctrl.type, config.algorithm.kl_ctrl.target_kl) == ("adaptive", 0.02)

    def test_free_mappings_take_any_entry(self) -> None:
        add = ["+data.apply_chat_template_kwargs.enable_thinking=false", "+data.apply_chat_template_kwargs.a.b=1"]
        config = load_config(None, add)
        assert config.data.apply_chat_template_kwargs == {"enable_thinking": False, "a": {"b": 1}}
        config = load_config(None, [*add, "~data.apply_chat_template_kwargs.a"])
        assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}

    def test_other_spellings_mean_one_thing(self) -> None:
        config = load_config(
            None,
            [
                "actor_rollout_ref.actor.strategy=fsdp",
                "critic.fsdp_config.dtype=bfloat16",
                "algorithm.kl_penalty=k3",
                "actor_rollout_ref.actor.checkpoint.contents=[model]",
                "critic.optim.warmup_style=cosine",
            ],
        )
        assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "fsdp2"
        assert config.critic.fsdp_config.dtype == "bf16"
        assert config.algorithm.kl_penalty == "low_var_kl"
        assert config.critic.checkpoint.save_contents == config.critic.checkpoint.load_contents == ["model"]
        assert config.critic.optim.lr_scheduler_type == "cosine"


class TestUnknownKeys:
    @pytest.mark.parametrize(
        "key, nearest",
        [
            ("trainer.save_frequency", "trainer.save_freq"),
            ("trainr.seed", "trainer.seed"),
            ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
            ("critic.optim.learning_rate_warmup_steps", "critic.optim.lr_warmup_steps"),
            ("actor_rollout_ref.actor.ppo_micro_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
            ("save_freq", "trainer.save_freq"),
            ("data.batch_size", "data.val_batch_size"),
        ],
    )
    @pytest.mark.parametrize("sign", ["", "+", "++", "~"])
    def test_nearest_is_named(self, sign: str, key: str, nearest: str) -> None:
        message = refusal(f"{sign}{key}=3")
        assert repr(key) in message and repr(nearest) in message

    def test_section_is_named(self) -> None:
        assert "section 'critic.optim' has no key 'lrr'" in refusal("critic.optim.lrr=1")
        assert "no section or key 'zzz'" in refusal("zzz=1")

    def test_in_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("trainer:\n  sed: 3\n")
        message = refusal(file=path)
        assert str(path) in message and "'trainer.sed'" in message and "'trainer.seed'" in message

    def test_verl_keys_that_live_elsewhere(self) -> None:
        assert "reward.path=" in refusal("custom_reward_function.path=x.py")
        assert "no rollout engine" in refusal("actor_rollout_ref.rollout.name=vllm")


class TestWrongValues:
    @pytest.mark.parametrize(
        "override, expected, got",
        [
            ("trainer.seed=often", "integer", "'often'"),
            ("trainer.seed=3.5", "integer", "3.5"),
            ("trainer.seed=true", "integer", "true"),
            ("trainer.seed=[1]", "integer", "[1]"),
            ("trainer.seed=null", "integer", "null"),
            ("trainer.seed='3'", "integer", "'3'"),
            ("critic.optim.lr=fast", "number", "'fast'"),
            ("trainer.val_before_train=1", "true or false", "1"),
            ("trainer.val_before_train=yes", "true or false", "'yes'"),
            ("data.train_files={a:1}", "list of text", "{'a': '1'}"),
            ("critic.optim.betas=0.9", "list of number", "0.9"),
            ("critic.optim.betas=[0.9]", "2 elements", "1"),
            ("reward.reward_kwargs=3", "mapping", "3"),
            ("actor_rollout_ref.actor.strategy=ddp", "fsdp2|deepspeed|megatron|fsdp", "'ddp'"),
            ("trainer.resume_mode=maybe", "auto|disable|resume_path", "'maybe'"),
            ("trainer.logger=[console,wandb]", "console|tensorboard", "'wandb'"),
            ("data.train_batch_size=0", "at least 1", "0"),
            ("algorithm.gamma=1.5", "at most 1", "1.5"),
            ("actor_rollout_ref.rollout.temperature=0", "more than 0", "0"),
            ("critic.optim.lr=nan", "at least 0", "nan"),
            ("critic.optim.lr=inf", "finite", "inf"),
        ],
    )
    def test_key_expectation_and_value_are_named(self, override: str, expected: str, got: str) -> None:
        message = refusal(override)
        assert override.partition("=")[0] in message and expected in message and got in message

    def test_section_is_no_value(self) -> None:
        assert "trainer is a section" in refusal("trainer=3")

    def test_unknown_interpolation(self) -> None:
        message = refusal("trainer.default_local_dir=${trainer.nope}/x")
        assert "trainer.default_local_dir" in message and "trainer.nope" in message

    def test_sweep(self) -> None:
        assert "[a,b]" in refusal("trainer.seed=1,2")

    @pytest.mark.parametrize(
        "overrides, words",
        [
            (["data.train_batch_size=100"], "not a multiple"),
            (["critic.ppo_mini_batch_size=100"], "critic.ppo_mini_batch_size=100"),
            (["trainer.resume_mode=resume_path"], "resume_from_path"),
            (["trainer.resume_from_path=x"], "resume_mode"),
            (["trainer.joint_engine=true"], "needs actor_rollout_ref.actor.strategy=deepspeed, and that is fsdp2"),
            (
                [f"critic.deepspeed_config.{setting}" for setting in ("offload_optimizer=true", "zero_stage=1")],
                "critic.deepspeed_config: offload_optimizer=true needs zero_stage 2 or 3",
            ),
            ([*JOINT, "critic.strategy=fsdp2"], "needs critic.strategy=deepspeed"),
            ([*JOINT, "critic.ppo_epochs=3"], "critic.ppo_epochs must be as"),
            ([*JOINT, "critic.grad_clip=3"], "critic.grad_clip must be as"),
            ([*JOINT, "critic.deepspeed_config.zero_stage=2"], "critic.deepspeed_config must be as"),
            ([*JOINT, "trainer.critic_warmup=1"], "no step updates the value model alone"),
            (
                [*JOINT, "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"],
                "milepost merge --role policy",
            ),
            (["trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=2"], "differ"),
            (["critic.checkpoint.save_contents=[model]"], "a step holds both roles alike"),
            (["trainer.save_freq=0"], "-1"),
            (["actor_rollout_ref.rollout.val_kwargs.do_sample=true"], "temperature"),
            (["reward.path=module"], "module:function"),
            (["task.val_size=1000"], "1000"),
            (["warm_start.hidden_size=30"], "hidden_size"),
        ],
    )
    def test_values_that_contradict_each_other(self, overrides: list[str], words: str) -> None:
        assert words in refusal(*overrides)


class TestFiles:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match=r"nope\.yaml"):
            load_config(tmp_path / "nope.yaml")

    @pytest.mark.parametrize(
        "text, words",
        [
            ("trainer: [\n", "line 2"),
            ("- 1\n", "expected sections"),
            ("a: 1\na: 2\n", "duplicate"),
            ("\x00", "not YAML"),
        ],
    )
    def test_bad(self, tmp_path: Path, text: str, words: str) -> None:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        message = refusal(file=path)
        assert str(path) in message and words in message

    def test_empty(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").touch()
        assert load_config(tmp_path / "c.yaml") == load_config(None)


class TestDescribing:
    def test_origin_of_each_value(self, yaml_file: Path) -> None:
        rows = {row.key: row for row in describe(yaml_file, ["trainer.nnodes=2"])}
        assert list(rows) == list(config_keys())
        assert (rows["trainer.nnodes"].origin, rows["trainer.nnodes"].value) == ("override", 2)
        assert (rows["trainer.seed"].origin, rows["trainer.seed"].value) == ("file", 7)
        assert rows["trainer.critic_warmup"].origin == "default"
        assert rows["trainer.save_freq"].origin == "embedded"
        assert rows["trainer.default_local_dir"].value == "checkpoints/theirs/additions"
        assert rows["critic.strategy"].type == "fsdp2|deepspeed|megatron|fsdp"
        assert rows["trainer.total_training_steps"].type == "integer or null"
        assert all(row.meaning for row in rows.values())

    def test_a_named_model_gets_the_defaults_of_a_real_one(self) -> None:
        embedded, real = load_config(None), load_config(None, ["actor_rollout_ref.model.path=/models/m"])
        assert (embedded.data.max_prompt_length, real.data.max_prompt_length) == (16, 512)
        assert (embedded.actor_rollout_ref.actor.optim.lr, real.actor_rollout_ref.actor.optim.lr) == (3e-4, 1e-6)
        assert (embedded.trainer.experiment_name, real.trainer.experiment_name) == ("additions", "ppo")
        assert real.trainer.total_training_steps is None
        # what the user says counts in both
        assert load_config(None, ["data.max_prompt_length=20"]).data.max_prompt_length == 20

    def test_what_the_embedded_run_sets_are_keys_of_the_schema(self) -> None:
        assert set(EMBEDDED) < set(config_keys())

    def test_the_yaml_in_configs_is_made_from_the_schema(self) -> None:
        path = ROOT / "configs" / "ppo_trainer.yaml"
        assert path.read_text() == render_yaml()
        model = ["actor_rollout_ref.model.path=/models/m"]
        assert load_config(path, model) == load_config(None, model)

    def test_every_key_has_its_meaning_in_the_yaml(self) -> None:
        text = render_yaml()
        assert all(key.meaning in text for key in config_keys().values())

    def test_round_trip_through_yaml(self, tmp_path: Path) -> None:
        config = load_config(None, ["critic.optim.lr=1e-7", "+reward.reward_kwargs.x='1e3'", "trainer.logger=[]"])
        (tmp_path / "c.yaml").write_text(config_yaml(config))
        assert load_config(tmp_path / "c.yaml") == config

    def test_json_schema(self) -> None:
        schema = json_schema()
        json.dumps(schema)
        critic = schema["properties"]["critic"]
        assert critic["additionalProperties"] is False
        assert critic["properties"]["optim"]["properties"]["lr"]["anyOf"][0] == {"type": "number", "minimum": 0}
        assert critic["properties"]["strategy"]["anyOf"][0]["enum"] == ["fsdp2", "deepspeed", "megatron", "fsdp"]

    def test_json_schema_accepts_the_yaml_and_refuses_a_typing_error(self) -> None:
        jsonschema = pytest.importorskip("jsonschema")
        defaults = yaml.safe_load(render_yaml())
        jsonschema.validate(defaults, json_schema())
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"trainer": {"sed": 1}}, json_schema())


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(None).trainer.seed = 3  # type: ignore[misc]


def test_importing_the_config_imports_no_torch() -> None:
    code = "import sys, milepost.trainer.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
