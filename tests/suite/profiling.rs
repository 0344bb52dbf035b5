//! `fireclay profile` and `fireclay bench`: findings, output and files.

use burn::tensor::Tensor;
use fireclay::ceilings::Ceilings;
use fireclay::profiling::{Profile, VerdictKind, verdicts};
use fireclay_kernels::recorder::{Call, Recording, op, operand, part, read_back};
use fireclay_kernels::{Activation, ActivationKind, Kernels, activate, use_kernels};
use serde_json::Value;

use crate::backend_test;
use crate::cli::{assert_refused, program, text, train};

/// The program on the backend under test.
fn fireclay(args: &[&str]) -> std::process::Output {
    program().args(args).args(["--backend", crate::backend().as_str()]).output().expect("the program starts")
}

#[track_caller]
fn done(output: &std::process::Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("text")
}

const SMALL: [&str; 12] = [
    "--count",
    "2",
    "--warm-up",
    "1",
    "--set",
    "d_model=16",
    "--set",
    "n_layers=2",
    "--set",
    "batch_size=2",
    "--set",
    "seq_length=16",
];

backend_test!(a_profile_names_what_breaks_residency::<B>(device) {
    /// An operation that reads its input, which a recording must notice.
    fn peek<B: fireclay_kernels::Backend>(x: &Tensor<B, 2>) -> f32 {
        let _op = op("peek", || Call::reads([operand(x)]));
        let data = x.to_data();
        read_back(data.bytes.len());
        data.iter::<f32>().sum()
    }
    let x = Tensor::<B, 2>::ones([8, 16], &device);
    let silu = Activation::plain(ActivationKind::Silu);
    drop((activate(x.clone(), silu), peek(&x)));
    let recording = Recording::start::<B>(&device).expect("a recording");
    for _ in 0..3 {
        let _inside = part("feed_forward");
        use_kernels(Kernels::Reference);
        let y = activate(x.clone(), silu);
        use_kernels(Kernels::Fused);
        assert!(peek(&y) > 0.0);
    }
    let report = recording.stop().expect("a report");
    let ceilings = Ceilings { bytes_per_second: 1e12, peaks: None };
    let profile = Profile {
        name: "test".into(),
        unit: "step",
        count: 3,
        seconds: 1.0,
        device: "a device".into(),
        report,
        ceilings,
        memory: None,
        note: None,
    };
    let found = verdicts(&profile);
    let of = |kind: VerdictKind| {
        found.iter().filter(|verdict| verdict.kind == kind).map(|verdict| verdict.text.clone()).collect::<Vec<_>>()
    };
    assert_eq!(of(VerdictKind::Fallback), ["activate ran its reference once per step: kernels=reference is set"]);
    let copies = of(VerdictKind::Copies);
    assert!(
        copies.contains(&"512 B copied to the host once per step by feed_forward: peek".to_string()),
        "{copies:?}: {}",
        profile.report
    );
});

#[test]
fn a_profile_of_training_is_a_table_a_trace_and_a_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let (trace, page) = (folder.path().join("trace.json"), folder.path().join("page.html"));
    let files = ["--trace", text(&trace), "--html", text(&page), "--peak", "1"];
    // No fallbacks, and no reads per step.
    let deny = ["--deny", "fallback,copies"];
    let table = done(&fireclay(&[&["profile", "train"], &SMALL[..], &files, &deny].concat()));
    for words in
        ["train stories, f32", "2 warm steps recorded", "head: head_loss", "optimizer: optimizer_step", "ceilings"]
    {
        assert!(table.contains(words), "'{words}' in {table}");
    }
    let trace: Value = serde_json::from_slice(&std::fs::read(trace).expect("a trace")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let of = |name: &str| events.iter().filter(|event| event["name"] == name).count();
    // Two layers in each of two steps, forward and backward.
    assert_eq!((of("attention: linear_add"), of("attention: linear_add backward")), (4, 4));
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(page.contains("class=\"flame\"") && page.contains("<circle") && page.ends_with("</html>"), "{page}");
}

#[test]
fn a_profile_for_programs_is_one_json_object_whose_shares_add_up() {
    let line = done(&fireclay(&[&["profile", "train", "--json"], &SMALL[..]].concat()));
    let profile: Value = serde_json::from_str(&line).expect("one JSON object");
    let rows = profile["rows"].as_array().expect("rows");
    let shares: f64 = rows.iter().filter_map(|row| row["share"].as_f64()).sum();
    assert!((shares - 1.0).abs() < 1e-6, "{shares}");
    let linear = rows.iter().find(|row| row["op"] == "linear_add" && row["part"] == "attention").expect("a projection");
    assert_eq!((linear["calls"].as_u64(), linear["inputs"][0].as_str()), (Some(4), Some("[32, 16] f32")));
}

#[test]
fn what_is_denied_and_found_ends_with_exit_code_1() {
    let reference = ["--set", "kernels=reference", "--deny", "fallback"];
    let output = fireclay(&[&["profile", "train"], &SMALL[..], &reference].concat());
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> =
        stderr.lines().filter(|line| line.starts_with("fireclay: found what --deny forbids: ")).collect();
    assert!(matches!(&lines[..], [line] if line.contains("ran its reference")), "{stderr}");
}

#[test]
fn decoding_is_profiled_without_its_prompt() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let small = ["--set", "d_model=16", "--set", "n_layers=2", "--set", "n_heads=2", "--set", "final_valid_tokens=0"];
    done(&train(
        &[&["--plain", "--steps", "2", "--set", "valid_tokens=100", "--out", text(&out)], &small[..]].concat(),
    ));
    let model = ["--model", text(&out), "--prompt", "There was once", "--deny", "fallback,copies,sync", "--json"];
    let line = done(&fireclay(&[&["profile", "generate", "--count", "40", "--warm-up", "2"], &model[..]].concat()));
    let profile: Value = serde_json::from_str(&line).expect("one JSON object");
    let rows = profile["rows"].as_array().expect("rows");
    let calls =
        |op: &str| rows.iter().filter(|row| row["op"] == op).filter_map(|row| row["calls"].as_u64()).sum::<u64>();
    // A fused step is one operation, on devices with a kernel for it.
    let whole = calls("decode_step");
    assert!(whole == 40 || whole == 0, "{line}");
    assert_eq!((calls("head_sample"), calls("cached_attention")), (40 - whole, 80 - 2 * whole), "{line}");
}

#[test]
fn decoding_a_large_model_sends_nothing_to_the_device() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    // On CUDA, a launch decodes several tokens of a model of this shape.
    let shape = ["d_model=1024", "n_layers=1", "n_heads=8", "n_kv_heads=4", "batch_size=1", "seq_length=32"];
    let shape = shape.iter().flat_map(|setting| ["--set", setting]);
    let arguments: Vec<&str> =
        ["--plain", "--steps", "1", "--out", text(&out), "--set", "final_valid_tokens=0", "--set", "valid_tokens=16"]
            .into_iter()
            .chain(shape)
            .collect();
    done(&train(&arguments));
    let mut arguments = vec!["profile", "generate", "--count", "20", "--warm-up", "2", "--model", text(&out)];
    arguments.extend(["--prompt", "There was once", "--deny", "fallback,copies,sync", "--json"]);
    if crate::backend().as_str() == "cuda" {
        arguments.extend(["--precision", "bf16"]);
    }
    done(&fireclay(&arguments));
}

#[test]
fn a_profile_refuses_what_means_nothing() {
    assert_refused(&fireclay(&["profile", "train", "--peak=-1"]), 2, &["--peak"]);
    let missing = fireclay(&["profile", "predict", "--model", "no/such/folder/here", "--text", "hello"]);
    assert_refused(&missing, 1, &["no/such/folder/here"]);
}

#[test]
fn a_benchmark_is_repeated_and_compared_with_an_earlier_run_and_a_peer() {
    let folder = tempfile::tempdir().expect("a folder");
    let earlier = folder.path().join("earlier.jsonl");
    let tiny = ["bench", "train", "--size", "cpu-4x128", "--batch", "1", "--length", "8", "--repeats", "3", "--json"];
    // Devices with their own memory report it in a second line.
    let first_of = |lines: &str| serde_json::from_str::<Value>(lines.lines().next().unwrap_or("")).expect("JSON");
    let lines = done(&fireclay(&tiny));
    let first = first_of(&lines);
    assert_eq!((first["case"].as_str(), first["repeats"].as_u64()), (Some("4 layers of 128 B=1 T=8"), Some(3)));
    let [min, value, max] = ["min", "value", "max"].map(|name| first[name].as_f64().expect("a number"));
    assert!(0.0 < min && min <= value && value <= max, "{first}");
    std::fs::write(&earlier, lines.replace(&value.to_string(), &(2.0 * value).to_string())).expect("a file");

    let peer = format!("cat {}", text(&earlier));
    let compared = done(&fireclay(&[&tiny[..], &["--compare", text(&earlier), "--peer", &peer]].concat()));
    let compared = first_of(&compared);
    assert_eq!(compared["repeats"].as_u64(), Some(4), "two halves");
    for speed in [&compared["earlier"]["speed"], &compared["peers"][0]["speed"]] {
        assert!(speed.as_f64().is_some_and(|speed| speed > 0.0 && speed < 2.0), "{compared}");
    }
    assert_refused(&fireclay(&["bench", "train", "--size", "huge"]), 2, &["--size huge", "gpt2-124m"]);
    let changed = done(&fireclay(&[&tiny[..], &["--set", "checkpoint_activations=1"]].concat()));
    assert_eq!(first_of(&changed)["case"], "4 layers of 128 B=1 T=8 checkpoint_activations=1");
    assert_refused(&fireclay(&[&tiny[..], &["--set", "depth=1"]].concat()), 2, &["unknown key depth"]);
    assert_refused(&fireclay(&["bench", "kernels", "--set", "n_layers=1"]), 2, &["--set n_layers=1", "bench train"]);
    assert_refused(&fireclay(&[&tiny[..], &["--compare", "nowhere.jsonl"]].concat()), 1, &["nowhere.jsonl"]);
}
