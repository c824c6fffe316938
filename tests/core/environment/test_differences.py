"""The ranking of differences, the ranks that differ, and what is collected."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tomllib
from datetime import datetime
from pathlib import Path

import pytest

from crossframe.environment import Effect, Environment, collect, differences, odd_ranks, read_environment
from crossframe.environment.collect import variables_of
from crossframe.environment.command import arguments_of
from crossframe.environment.configuration import format_configuration, read_configuration
from crossframe.environment.effects import ACCELERATOR, CPU, TABLE, row_of
from crossframe.environment.facts import LONGEST, SECTIONS
from crossframe.errors import RecordingError, UsageError
from crossframe.recording import program
from tests.core.environment.cases import CASES


def test_each_row_has_an_effect_and_a_clause():
    for row in TABLE:
        assert isinstance(row.effect, Effect) and row.section in SECTIONS and row.device in ("", CPU, ACCELERATOR), row
        assert " " in row.reason and not row.reason.endswith("."), row


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_the_first_difference_is_the_expected_one(case):
    found, mirrored = (differences(*map(Environment, pair)) for pair in ((case.a, case.b), (case.b, case.a)))
    assert (found[0].section, found[0].name, found[0].effect.value) == (case.section, case.first, case.effect)
    assert [(each.name, each.effect, each.b, each.a) for each in mirrored] == [
        (each.name, each.effect, each.a, each.b) for each in found
    ]


# A name of each row of the table, in its order.
EXAMPLES = (
    *(
        "w",
        "dtype",
        "1.norm",
        "initial values",
        "order of samples",
        "batches",
        "the constant w",
        "weight_decay",
        "seed",
        "accumulate",
    ),
    *("jax_enable_x64", "JAX_ENABLE_X64", "torch.backends.cudnn.allow_tf32", "NVIDIA_TF32_OVERRIDE"),
    *("jax_threefry_partitionable", "JAX_DEFAULT_PRNG_IMPL", "trainer.wandb.model", "a.yaml: logger.lr", "--log-every"),
    *(
        "a.yaml: output_dir",
        "--data-dir",
        "a.yaml: data.path",
        "--learning-rate",
        "model.hidden_size",
        "file train.py",
        "--foo",
        "a.yaml: foo",
        "numpy",
    ),
    *("torch.cuda", "framework", "device", "compiled", "torch.backends.cuda.matmul.allow_fp16_accumulation"),
    *("tf32", "torch.get_float32_matmul_precision", "NVIDIA_TF32_OVERRIDE", "torch", "jaxlib", "nvidia-nccl-cu12"),
    *("flash-attn", "transformers", "numpy", "torch.backends.cudnn.benchmark", "attention", "mesh", "steps"),
    *("XLA_FLAGS --xla_dump_to", "XLA_FLAGS --xla_cpu_enable_fast_math", "NCCL_PROTO", "CUBLAS_WORKSPACE_CONFIG"),
    *("MKL_NUM_THREADS", "threads", "ATEN_CPU_CAPABILITY", "PYTHONHASHSEED", "LD_PRELOAD", "processor", "driver"),
    *(
        "platform",
        "commit",
        "pip",
        "NCCL_SOCKET_IFNAME",
        "CUDA_VISIBLE_DEVICES",
        "python",
        "host",
        "detail",
        "changed README.md",
    ),
)


def test_each_row_of_the_table_is_reached_by_its_own_facts():
    assert len(EXAMPLES) == len(TABLE)
    for i, (row, name) in enumerate(zip(TABLE, EXAMPLES, strict=True)):
        assert row_of(row.section, name, row.device or CPU)[0] == i, (row, name)


# Of nanoGPT's train.py and of the TrainingArguments and configurations of transformers; then of other scripts.
CHANGE_NUMBERS = """batch_size block_size n_layer n_head n_embd dropout learning_rate weight_decay beta1 beta2 grad_clip decay_lr
    warmup_iters lr_decay_iters min_lr dtype gradient_accumulation_steps init_from dataset per_device_train_batch_size
    lr_scheduler_type warmup_ratio adam_beta1 adam_epsilon max_grad_norm label_smoothing_factor tokenizer_name max_seq_length bf16
    fp16 optim seed vocab_size hidden_size num_attention_heads rope_theta tie_word_embeddings torch_dtype attention_dropout
    initializer_range rms_norm_eps num_experts resume_from_checkpoint hidden_act activation_function
    bs opt_eps opt_betas momentum wd width depth dim mlp_dims amp optimizer scheduler noise_schedule clip_mode
    gradient_clipping grad_accum_steps arch architecture seq_len max_length resume initial_checkpoint ckpt pretrained shuffle
    augment bce_loss temperature scale rope_scaling theta"""
OUTPUTS = """out_dir log_interval wandb_log wandb_project wandb_run_name output_dir logging_steps logging_dir save_steps
    save_total_limit run_name dataloader_num_workers logger logs tensorboard verbose quiet master_port notes tags print_freq
    profile profiler exp_name experiment progress_bar"""
PATHS = """data_dir model_directory checkpoint_path data_root dataset_cache image_data_folder vocab_file data_files"""


@pytest.mark.parametrize(
    ("names", "effect"), [(CHANGE_NUMBERS, Effect.CERTAINLY), (PATHS, Effect.POSSIBLY), (OUTPUTS, Effect.HARDLY)]
)
def test_options_of_known_scripts_have_the_right_effect(names, effect):
    for name in names.split():
        for section, option in (("command", f"--{name}"), ("configuration", f"a.yaml: train.{name}")):
            (found,) = differences(Environment({section: {option: 1}}), Environment({section: {option: 2}}))
            assert found.effect is effect, option


# Those that MKL, OpenMP and OpenBLAS document.
THREADS = "OMP_NUM_THREADS OMP_DYNAMIC OMP_SCHEDULE OMP_THREAD_LIMIT MKL_NUM_THREADS MKL_DYNAMIC OPENBLAS_NUM_THREADS"


def test_variables_of_threads_may_have_an_effect():
    for name in THREADS.split():
        (found,) = differences(Environment({"variables": {name: "1"}}), Environment({"variables": {name: "2"}}))
        assert found.effect is Effect.POSSIBLY and "number of threads" in found.reason, name


def test_every_section_has_a_last_row_for_all_names():
    for section in SECTIONS:
        assert row_of(section, "a name that nobody knows", ACCELERATOR)[1].reason


def test_the_same_environment_has_no_differences():
    found = collect({"device": "cpu"}, {"torch": "1"}, {"": "Net()"})
    assert differences(found, found) == ()


def test_a_missing_fact_counts_only_in_complete_environments():
    one, other = {"packages": {"torch": "2", "triton": "3"}}, {"packages": {"torch": "2"}}
    assert [each.name for each in differences(Environment(one), Environment(other))] == ["triton"]
    assert differences(Environment(one), Environment(other, is_complete=False)) == ()
    settings = {"framework": {"new_flag": True}}  # another version has other flags
    assert differences(Environment(settings), Environment({"framework": {}})) == ()


def test_a_commit_with_equal_sources_hardly_matters():
    a, b = ({"source": {"commit": commit, "file train.py": "1"}} for commit in ("x", "y"))
    assert differences(Environment(a), Environment(b))[0].effect is Effect.HARDLY
    b["source"]["file train.py"] = "2"
    first, second = differences(Environment(a), Environment(b))
    assert (first.describe(), second.effect) == ("the source train.py differs", Effect.POSSIBLY)
    b["source"]["file more.py"] = "3"
    found = differences(Environment(a), Environment(b))[0]
    assert found.describe() == "the source more.py is in b alone"
    fields = found.to_json()
    assert (fields["a"], fields["b"], fields["absent"], fields["description"]) == (None, "3", ["a"], found.describe())


def test_the_rank_with_another_version_is_found():
    def stated(rank, **packages):
        machine = {"host": f"node{rank // 2}"}
        return Environment(
            {"packages": {"torch": "2.13.0"} | packages, "machine": machine, "random": {"torch": str(rank)}}
        )

    job = {rank: stated(rank) for rank in range(8)}
    assert odd_ranks(job) == ()
    job[4] = stated(4, torch="2.11.0")
    job[5] = stated(5, torch="2.11.0", pip="1")
    found = odd_ranks(job)
    assert [(each.difference.name, each.ranks, each.hosts) for each in found] == [
        ("torch", (4, 5), ("node2",)),
        ("pip", (5,), ("node2",)),
    ]
    assert found[0].describe() == "the version of torch on all ranks of node2 is 2.11.0, on the other ranks 2.13.0"
    assert found[1].describe() == "the version of pip on rank 5 (node2) is 1, on the other ranks not installed"


@pytest.mark.parametrize(
    ("odd", "hosts", "said"),
    [
        pytest.param(range(8, 24), 5, "all ranks of node1, node2", id="two hosts"),
        pytest.param(
            range(80), 21, "all ranks of node0, node1, node2, node3, node4, node5, node6, node7 and 2 more", id="ten"
        ),
        pytest.param(
            range(9, 24), 4, "ranks 9, 10, 11, 12, 13, 14, 15, 16 and 7 more (node1, node2)", id="all but one"
        ),
        pytest.param(range(8), 1, "ranks 0, 1, 2, 3, 4, 5, 6, 7 (node0)", id="hosts that are not all known"),
    ],
)
def test_odd_ranks_that_fill_hosts_are_named_by_them(odd, hosts, said):
    """Eight ranks lie on each host."""
    job = {}
    for rank in range(8 * max(hosts, 4)):
        host = f"node{rank // 8}" if rank < 8 * hosts else ""
        job[rank] = Environment(
            {"packages": {"torch": "2.11.0" if rank in odd else "2.13.0"}, "machine": {"host": host}}
        )
    (found,) = odd_ranks(job)
    assert found.ranks == tuple(odd)
    assert found.describe() == f"the version of torch on {said} is 2.11.0, on the other ranks 2.13.0"


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_ranks_may_have_a_machine_and_devices_of_their_own(variable):
    job = {
        rank: Environment({"machine": {"host": f"node{rank}"}, "variables": {variable: str(rank)}}) for rank in range(4)
    }
    assert odd_ranks(job) == ()


def test_two_ranks_have_no_majority():
    job = {
        rank: Environment({"variables": {"NCCL_ALGO": algorithm}}) for rank, algorithm in enumerate(("Ring", "Tree"))
    }
    (found,) = odd_ranks(job)
    assert not found.by_majority
    assert found.describe() == "the variable NCCL_ALGO on rank 1 is Tree, on rank 0 Ring"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "hub": {"api_key": "s3cret"}}'),
        ("a.toml", '[optimizer]\nlr = 0.1\nbetas = [0.9, 0.95]\n[hub]\napi_key = "s3cret"\n'),
        ("a.yaml", "optimizer:\n  lr: 0.1\n  betas: [0.9, 0.95]\nhub:\n  api_key: s3cret\n"),
    ],
)
def test_configurations_are_read_key_by_key(tmp_path, name, text):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    found = read_configuration(tmp_path / name)
    assert str(found.pop("hub.api_key")).startswith("sha256 ")
    assert found == {"optimizer.lr": 0.1, "optimizer.betas": "[0.9, 0.95]"}


def test_invalid_configurations_raise(tmp_path):
    (tmp_path / "a.toml").write_text("a = ")
    with pytest.raises(UsageError, match=r"a\.toml.*expected toml, cannot parse"):
        read_configuration(tmp_path / "a.toml")
    with pytest.raises(UsageError, match="no such file"):
        read_configuration(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "a.conf",
            "a.conf: expected a configuration file with one of the suffixes .json, .toml, .ini, .cfg, .yaml, .yml",
        ),
        ("a.yaml", "a.yaml: needs PyYAML: pip install pyyaml, or pass the configuration as JSON or TOML"),
    ],
)
def test_configurations_without_a_parser_raise(tmp_path, monkeypatch, name, message):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / name).write_text("a: 1")
    with pytest.raises(UsageError) as caught:
        read_configuration(tmp_path / name)
    assert str(caught.value) == f"{tmp_path}/{message}"


def test_a_toml_file_states_dates_and_no_null():
    at = datetime(2026, 1, 2, 3, 4, 5)
    values = {"day": at.date(), "time": at.time(), "both": at}
    assert tomllib.loads(format_configuration(values, ".toml")) == values
    with pytest.raises(UsageError, match=r"^a TOML file cannot state None$"):
        format_configuration({"a": None}, ".toml")


@pytest.mark.parametrize(
    "key", ["hub.password", "x_secret", "api-key", "APIKEY", "credential", "credentials", "passwd"]
)
def test_values_of_secret_keys_are_digests(tmp_path, key):
    (tmp_path / "a.json").write_text(json.dumps({key: "s3cret", f"{key}_file": "path", f"{key}s3": 1}))
    found = read_configuration(tmp_path / "a.json")
    assert found == {key: "sha256 1ec1c26b50d5d3c5", f"{key}_file": "path", f"{key}s3": 1}


def test_what_a_process_runs_in_is_collected(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    (tmp_path / "c.json").write_text('{"lr": 1}')
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for arguments in (["init", "-q"], ["add", "train.py", "c.json"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "c.json").write_text('{"lr": 2}')
    script.write_text("pass  # changed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script), "--config", "c.json", "--lr=3"])
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_LAUNCH_MODE", "x" * 10_000)
    found = collect({"device": "cpu"})
    assert found["command"] == {"script": "train.py", "--config": "c.json", "--lr": "3"}
    assert found["configuration"] == {"c.json: lr": 2}
    assert {"commit", "file train.py", "changed c.json"} <= found["source"].keys()
    assert "changed train.py" not in found["source"]  # it ran, so its digest is stated already
    assert found["source"]["file train.py"] == hashlib.sha256(script.read_bytes()).hexdigest()[:16]
    script.write_text("pass  # changed again\n")  # between two recordings of one process
    assert collect({})["source"]["file train.py"] == hashlib.sha256(script.read_bytes()).hexdigest()[:16]
    assert found["variables"]["NCCL_ALGO"] == "Ring" and "HOME" not in found["variables"]
    assert found["packages"]["numpy"] and found["random"].keys() == {"python", "numpy"}
    assert {"host", "python", "system", "kernel", "libc", "processor"} <= found["machine"].keys()
    assert (
        collect({}, {"jax": "x"}, {"": "Net()"}).sections.items() >= {"modules": {"": "Net()"}, "framework": {}}.items()
    )
    assert collect({}, {"jax": "x"})["random"]["jax"] == "x"
    folder = tmp_path / "rank00003"
    folder.mkdir()
    (folder / "environment.json").write_bytes(found.to_bytes())
    assert read_environment(tmp_path, 3) == found and read_environment(tmp_path, 0) is None


def test_sources_and_configurations_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    for name, content in (("gone.py", "x"), ("kept.py", "y"), ("bad.json", "{")):
        (tmp_path / name).write_text(content)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for arguments in (["init", "-q"], ["add", "gone.py", "kept.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "gone.py").unlink()
    monkeypatch.chdir(tmp_path)
    too_long = "n" * 300 + ".json"
    monkeypatch.setattr(
        "sys.argv", [str(tmp_path / "train.py"), too_long, "--config=bad.json", "absent.json", "kept.py"]
    )
    found = collect({})
    assert found["source"]["changed gone.py"] == "not readable" and "changed kept.py" not in found["source"]
    assert found["configuration"] == {"bad.json: sha256": hashlib.sha256(b"{").hexdigest()[:16]}


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.2",
            "580.95.05",
        ),
        ("NVRM version: none", None),
        (None, None),
    ],
)
def test_the_version_of_the_driver_is_collected(monkeypatch, text, driver):
    read = Path.read_text

    def read_text(self, *arguments, **options):
        if str(self) != "/proc/driver/nvidia/version":
            return read(self, *arguments, **options)
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
    assert collect({})["machine"].get("driver") == driver


def test_no_process_is_started_outside_of_repositories(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: started.append(command[-1]))
    monkeypatch.setattr("sys.argv", [str(tmp_path / "train.py")])
    assert "commit" not in collect({})["source"] and not started


def test_git_that_is_not_installed_is_no_error(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr("sys.argv", [str(tmp_path / "train.py")])
    monkeypatch.setenv("PATH", os.devnull)
    assert "commit" not in collect({})["source"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[]", "expected an object"),
        ("{", "expected JSON"),
        (json.dumps({"packages": {"torch": [1]}}), "expected for 'torch' a number"),
        (json.dumps({"colours": {}}), "expected sections of"),
        (json.dumps({"packages": 1}), "expected an object"),
    ],
)
def test_damaged_environments_raise(tmp_path, content, expected):
    (tmp_path / "rank00000").mkdir()
    (tmp_path / "rank00000" / "environment.json").write_text(content)
    with pytest.raises(RecordingError, match=f"{expected}.*record the run again"):
        read_environment(tmp_path, 0)


def test_names_and_texts_have_a_largest_length():
    longest = "x" * LONGEST
    assert Environment({"packages": {longest: longest}})["packages"] == {longest: longest}
    for facts in ({f"{longest}x": 1}, {"x": f"{longest}x"}):
        with pytest.raises(RecordingError, match=f"'packages': expected .* at most {LONGEST} characters, got"):
            Environment({"packages": facts})


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("model.width=64", "model.width", "64"),
        ("+a.b_c=1", "+a.b_c", "1"),
        ("x=a=b", "x", "a=b"),
        ("data/a=b.txt", "argument 1", "data/a=b.txt"),
        ("a b=c", "argument 1", "a b=c"),
        ("=1", "argument 1", "=1"),
        ("-1", "argument 1", "-1"),
    ],
)
def test_a_word_with_a_name_and_a_value_is_an_option(word, name, value):
    assert arguments_of(["t.py", word]) == {"script": "t.py", name: value}


def test_negative_numbers_are_values_of_options():
    assert arguments_of(["t.py", "--shift", "-1", "-v", "-k", "x"]) == {
        "script": "t.py",
        "--shift": "-1",
        "-v": True,
        "-k": "x",
    }


def test_a_module_of_another_class_may_compute_the_same():
    one, other = ({"modules": {"norm": f"{name}((8,), eps=1e-05)"}} for name in ("LayerNorm", "NormByHand"))
    (found,) = differences(Environment(one), Environment(other))
    assert (found.effect, found.reason) == (Effect.POSSIBLY, "the module is of another class")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("N((8,), eps=1e-05, x=1)", "N((8,), eps=1e-06, x=1)", ("N(eps=1e-05)", "N(eps=1e-06)")),
        pytest.param(*(f"N(eps={eps}, x={'y' * 100})" for eps in (1, 2)), ("N(eps=1)", "N(eps=2)"), id="long"),
        ("N((8,), eps=1)", "M((8,), eps=2)", None),
        ("N(8, eps=1)", "N(8, eps=2, x=1)", None),
        ("N(8) + a", "N(9) + b", None),
        ("N((8, 4), x=1)", "N((8, 5), x=1)", ("N((8, 4))", "N((8, 5))")),
    ],
)
def test_modules_of_one_class_are_named_by_the_options_that_differ(one, other, expected):
    (found,) = differences(*(Environment({"modules": {"norm": text}}) for text in (one, other)))
    x, y = expected or (one, other)
    assert found.describe(("p", "q")) == f"module 'norm' differs: {x} in p, {y} in q"


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"])
def test_folders_of_compiled_code_are_not_compared(name):
    assert variables_of({name: "/cache", "NCCL_ALGO": "Ring"}) == {"NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        ("processor\t: 0\nmodel name\t: A CPU: 2 GHz\nmodel name\t: Another\n", "A CPU: 2 GHz"),
        ("processor\t: 0\n", "the machine"),  # as on some ARM machines
        (None, "the processor"),
    ],
)
def test_the_processor_is_known_by_its_model(tmp_path, monkeypatch, cpuinfo, model):
    def opened(path, **_):
        assert path == "/proc/cpuinfo"
        if cpuinfo is None:
            raise FileNotFoundError
        return io.StringIO(cpuinfo)

    monkeypatch.setattr(program, "open", opened, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "the machine")
    monkeypatch.setattr("platform.processor", lambda: "the processor")
    assert program.processor() == model
    monkeypatch.setattr("platform.processor", lambda: "")
    assert program.processor() == (model if cpuinfo else "the machine")
