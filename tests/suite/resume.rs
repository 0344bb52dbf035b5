//! Runs that are killed at any moment and resume exactly.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fireclay_kernels::RandomKey;

fn fireclay() -> Command {
    let mut command = crate::cli::program();
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// A small run with dropout, forty steps long, a checkpoint every four.
fn begin(out: &Path) -> Child {
    begin_command(out).spawn().expect("the program starts")
}

fn begin_command(out: &Path) -> Command {
    small_run(&["stories"], out)
}

fn small_run(data: &[&str], out: &Path) -> Command {
    let settings = [
        "d_model=16",
        "n_layers=1",
        "n_heads=2",
        "dropout=0.2",
        "batch_size=2",
        "warmup_steps=3",
        "valid_tokens=300",
        "final_valid_tokens=0",
        "valid_every=8",
        "checkpoint_every=4",
        "steps=40",
    ];
    let mut command = fireclay();
    command.arg("train").args(data).args(["--plain", "--backend", crate::backend().as_str(), "--out"]).arg(out);
    settings.iter().for_each(|setting| {
        command.args(["--set", setting]);
    });
    command
}

fn resume(out: &Path) -> Child {
    let mut command = fireclay();
    command.args(["train", "--resume", "--plain", "--backend", crate::backend().as_str(), "--out"]).arg(out);
    command.spawn().expect("the program starts")
}

fn weights(out: &Path) -> Vec<u8> {
    std::fs::read(out.join("model.safetensors")).expect("a model")
}

/// Whether `path` is the name of a complete checkpoint: `step-`, its number, and no extension.
fn is_checkpoint(path: &Path) -> bool {
    path.extension().is_none() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"))
}

/// Every file of every checkpoint can be read.
fn assert_whole(out: &Path) {
    let checkpoints = std::fs::read_dir(out.join("training")).into_iter().flatten().flatten();
    for checkpoint in checkpoints.map(|entry| entry.path()).filter(|path| is_checkpoint(path)) {
        for name in ["model.safetensors", "optimizer.safetensors"] {
            let bytes = std::fs::read(checkpoint.join(name)).expect("a whole checkpoint");
            safetensors::SafeTensors::deserialize(&bytes).expect("a readable checkpoint");
        }
        for name in ["config.json", "tokenizer.json", "state.json"] {
            let text = std::fs::read_to_string(checkpoint.join(name)).expect("a whole checkpoint");
            serde_json::from_str::<serde_json::Value>(&text).expect("readable JSON");
        }
    }
}

#[test]
fn a_killed_run_resumes_to_the_same_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let (straight, killed) = (folder.path().join("straight"), folder.path().join("killed"));
    assert!(begin(&straight).wait().expect("it ends").success());

    let mut child = begin(&killed);
    let begun = Instant::now();
    while !killed.join("training/step-00000020").exists() {
        assert!(begun.elapsed() < Duration::from_secs(300), "no checkpoint at step 20");
        assert!(child.try_wait().expect("its state").is_none_or(|status| status.success()), "it failed");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().expect("it can be killed");
    child.wait().expect("it ends");
    if !killed.join("training/step-00000040").exists() {
        assert!(resume(&killed).wait().expect("it ends").success());
    }
    assert_eq!(weights(&straight), weights(&killed));
}

/// Converts a checkpoint's optimizer to the old format of AdamW, without its name.
#[cfg(unix)]
fn forget_the_optimizer(file: &Path) {
    let bytes = std::fs::read(file).expect("a checkpoint");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("a readable checkpoint");
    let older = tensors.iter().map(|(name, view)| (name.strip_prefix("adamw.").expect("its name").to_string(), view));
    let older: Vec<_> = older.collect();
    safetensors::serialize_to_file(older, None, &file.with_extension("older")).expect("a file");
    std::fs::rename(file.with_extension("older"), file).expect("a file");
}

#[cfg(unix)]
#[test]
fn a_run_from_before_optimizers_had_names_goes_on_to_the_same_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let (named, older) = (folder.path().join("named"), folder.path().join("older"));
    assert!(begin(&named).wait().expect("it ends").success());
    assert!(Command::new("cp").arg("-r").args([&named, &older]).status().expect("cp is installed").success());
    let checkpoint = older.join("training/step-00000040");
    forget_the_optimizer(&checkpoint.join("optimizer.safetensors"));
    let state = checkpoint.join("state.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&state).expect("a state")).expect("JSON");
    assert_eq!(json["recipe"]["training"]["optimizer"], "adamw");
    json["recipe"]["training"].as_object_mut().expect("a table").remove("optimizer");
    std::fs::write(&state, json.to_string()).expect("a file");
    for out in [&named, &older] {
        let mut command = fireclay();
        command.args(["train", "--resume", "--plain", "--backend", crate::backend().as_str(), "--steps", "48"]);
        assert!(command.arg("--out").arg(out).status().expect("the program starts").success());
    }
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let [named, older] = [&named, &older]
            .map(|out| std::fs::read(out.join("training/step-00000048").join(file)).expect("a checkpoint"));
        assert_eq!(named, older, "{file}");
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_and_says_how_to_go_on() {
    assert_stops("-INT", 130);
}

#[cfg(unix)]
#[test]
fn sigterm_saves_and_says_how_to_go_on() {
    assert_stops("-TERM", 143);
}

/// A run that gets `signal` saves, prints how to resume and exits with `code`; resumed, it ends
/// with the same bytes as an uninterrupted run.
#[cfg(unix)]
fn assert_stops(signal: &str, code: i32) {
    let folder = tempfile::tempdir().expect("a folder");
    let (straight, stopped) = (folder.path().join("straight"), folder.path().join("stopped"));
    assert!(begin(&straight).wait().expect("it ends").success());

    let mut command = begin_command(&stopped);
    let mut child = command.stderr(Stdio::piped()).spawn().expect("the program starts");
    await_step(&stopped, 4);
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill is installed");
    assert!(sent.success());
    let mut told = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().expect("its stderr"), &mut told).expect("text");
    let status = child.wait().expect("it ends");
    // Such a short run may end before the signal; then there is nothing to resume.
    if !status.success() {
        assert_eq!(status.code(), Some(code), "{told}");
        let last = told.lines().last().unwrap_or("");
        assert!(last.contains("stopped and saved at step") && last.contains("--resume --out"), "{told}");
        assert!(resume(&stopped).wait().expect("it ends").success());
    }
    assert_eq!(weights(&straight), weights(&stopped));
}

/// Waits until the run in `out` has a checkpoint of `step`.
fn await_step(out: &Path, step: u64) {
    let begun = Instant::now();
    while !out.join(format!("training/step-{step:08}")).exists() {
        assert!(begun.elapsed() < Duration::from_secs(300), "no checkpoint at step {step}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A long run on `data` that has saved a checkpoint and is still running.
fn long_run(data: &Path, out: &Path) -> Child {
    std::fs::write(data, "Once upon a time there was a small owl.\n".repeat(400)).expect("a text");
    let data = data.to_str().expect("its path is text");
    let child = small_run(&["--data", data], out).args(["--set", "steps=1000000"]).spawn().expect("the program starts");
    await_step(out, 4);
    child
}

#[test]
fn one_process_at_a_time_trains_in_a_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let (data, out) = (folder.path().join("owl.txt"), folder.path().join("run"));
    let mut child = long_run(&data, &out);
    let mut command = fireclay();
    command.args(["train", "--resume", "--plain", "--backend", crate::backend().as_str(), "--out"]).arg(&out);
    let second = command.stderr(Stdio::piped()).output().expect("the program starts");
    child.kill().expect("it can be killed");
    child.wait().expect("it ends");
    let told = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1), "{told}");
    assert!(told.contains("another process is training in") && told.lines().count() == 1, "{told}");
}

#[test]
fn a_run_whose_data_moved_or_changed_goes_on_only_when_told_to() {
    let folder = tempfile::tempdir().expect("a folder");
    let (data, out) = (folder.path().join("owl.txt"), folder.path().join("run"));
    let mut child = long_run(&data, &out);
    child.kill().expect("it can be killed");
    child.wait().expect("it ends");
    let entries = std::fs::read_dir(out.join("training")).expect("checkpoints").flatten().map(|entry| entry.path());
    let names = entries.filter(|path| is_checkpoint(path)).map(|path| path.to_string_lossy().into_owned());
    let last = names.filter_map(|name| name.rsplit('-').next()?.parse::<u64>().ok()).max().expect("a checkpoint");
    let go_on = |steps: u64, more: &[&str]| {
        let mut command = fireclay();
        command.args(["train", "--resume", "--plain", "--backend", crate::backend().as_str()]);
        command.args(["--steps", &(last + steps).to_string()]).args(more).arg("--out").arg(&out);
        let output = command.stderr(Stdio::piped()).stdout(Stdio::null()).output().expect("the program starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let moved = folder.path().join("moved.txt");
    std::fs::rename(&data, &moved).expect("renamed");
    let (code, told) = go_on(4, &[]);
    assert!(code == Some(1) && told.contains("if it was moved, give its new path"), "{code:?}: {told}");
    let (code, told) = go_on(4, &["--set", &format!("source={}", moved.display())]);
    assert_eq!(code, Some(0), "{told}");
    std::fs::write(&moved, "Once upon a time there was a nice owl.\n".repeat(400)).expect("a text");
    let (code, told) = go_on(8, &[]);
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("changed (sha256 was") && told.contains("--allow-changed-data"), "{told}");
    let (code, told) = go_on(8, &["--allow-changed-data"]);
    assert_eq!(code, Some(0), "{told}");
}

#[test]
fn a_resumed_run_keeps_the_settings_of_its_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    assert!(begin_command(&out).args(["--set", "steps=4"]).status().expect("the program starts").success());
    let go_on = |setting: &str| {
        let mut command = fireclay();
        command.args(["train", "--resume", "--plain", "--backend", crate::backend().as_str(), "--steps", "8"]);
        command.args(["--set", setting, "--out"]).arg(&out);
        let output = command.stderr(Stdio::piped()).output().expect("the program starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, told) = go_on("d_model=32");
    assert_eq!(code, Some(2), "{told}");
    assert!(told.contains("--resume keeps the run's d_model (16): leave out --set d_model"), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    let (code, told) = go_on("d_model=16");
    assert_eq!(code, Some(0), "{told}");
}

#[test]
fn twenty_kills_at_random_moments_leave_no_unreadable_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let (straight, killed) = (folder.path().join("straight"), folder.path().join("killed"));
    let begun = Instant::now();
    assert!(begin(&straight).wait().expect("it ends").success());
    let whole = begun.elapsed();

    let key = RandomKey::new(20);
    let mut finished = false;
    for round in 0..20 {
        let started = killed.join("training").exists()
            && std::fs::read_dir(killed.join("training"))
                .is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(|entry| is_checkpoint(&entry.path()))));
        if !started {
            let _ = std::fs::remove_dir_all(&killed);
        }
        let mut child = if started { resume(&killed) } else { begin(&killed) };
        // Up to a sixth of a whole run, so that twenty rounds cover it.
        std::thread::sleep(whole.mul_f64(key.uniform(0, round) / 6.0));
        finished |= child.try_wait().expect("its state").is_some_and(|status| status.success());
        let _ = child.kill();
        child.wait().expect("it ends");
        assert_whole(&killed);
    }
    if !killed.join("training/step-00000040").exists() {
        let has_checkpoint = std::fs::read_dir(killed.join("training"))
            .is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(|entry| is_checkpoint(&entry.path()))));
        if !has_checkpoint {
            let _ = std::fs::remove_dir_all(&killed);
        }
        let mut child = if has_checkpoint { resume(&killed) } else { begin(&killed) };
        assert!(child.wait().expect("it ends").success(), "finished before: {finished}");
    }
    assert_eq!(weights(&straight), weights(&killed));
}
