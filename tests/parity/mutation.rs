//! Checks that some test fails for every kind of wrong result.
//!
//! `kernels/src/mutation.rs` corrupts one tensor of one method's result. For each such corruption,
//! this runs the tests of this binary that compute the result, the quickest first, until one fails.
//! The methods are read from the operations' traits.
//!
//! The parity binary covers all methods but [`IN_THE_SUITE`], the suite's binary these.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Methods without a tensor in their result, but for `store`, whose result other methods compute with.
const WITHOUT_RESULT: [&str; 8] =
    ["collective", "decode_plan", "downloads_at_once", "finish_uploads", "is_synchronous", "memory", "probe", "store"];

const FLOATS: [&str; 4] = ["zeros", "factor", "previous-row", "wrong-row"];
const INTEGERS: [&str; 2] = ["off-by-one", "swapped-pair"];

/// Methods whose tests need whole models, with a part of these tests' names.
const IN_THE_SUITE: [&str; 1] = ["decode_step"];
const TESTS_IN_THE_SUITE: &str = "whole_steps::";

fn repository() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The binary may run on another machine, in the repository's root.
    if built.join("kernels/src/ops").is_dir() { built.into() } else { std::env::current_dir().expect("a folder") }
}

/// The methods of all operation traits, by the list in `backend.rs`.
fn methods() -> BTreeSet<String> {
    let source = repository().join("kernels/src");
    let list = fs::read_to_string(source.join("backend.rs")).expect("the list of the operations' traits");
    let list = list.split("backend! {").nth(1).expect("a list");
    let names: BTreeSet<&str> = list.split(['}', ',']).map(str::trim).filter(|name| name.ends_with("Ops")).collect();
    let mut found = BTreeSet::new();
    let mut methods = BTreeSet::new();
    let folders = fs::read_dir(source.join("ops")).expect("the operations");
    let folders = folders.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_dir());
    for folder in folders.chain([source.join("recorder")]) {
        let text = fs::read_to_string(folder.join("mod.rs")).expect("an operation's file");
        let mut inside = false;
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("pub trait ") {
                let name = name.split(':').next().expect("a name");
                inside = names.contains(name);
                found.extend(inside.then(|| name.to_string()));
            } else if line == "}" {
                inside = false;
            } else if let Some(method) = line.strip_prefix("    fn ").filter(|_| inside) {
                let name = method.split(['(', '<']).next().expect("a name");
                assert!(methods.insert(name.to_string()), "two operations have a method {name}");
            }
        }
    }
    assert_eq!(found.iter().map(String::as_str).collect::<BTreeSet<_>>(), names, "the traits in kernels/src/ops");
    methods
}

/// A tensor of a result: its kinds, and the tests that compute it, quickest first.
#[derive(Default)]
struct Spot {
    computed: BTreeSet<String>,
    tests: Vec<(u128, String)>,
}

impl Spot {
    fn kinds(&self) -> Vec<&'static str> {
        let has = |what: &str| self.computed.contains(what);
        // A single row has no row before it.
        let floats = if has("floats") {
            4
        } else if has("row") {
            2
        } else {
            0
        };
        let integers = if has("integers") { 2 } else { usize::from(has("integer")) };
        FLOATS[..floats].iter().chain(&INTEGERS[..integers]).copied().collect()
    }
}

fn this_binary() -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a test knows its binary"));
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    // Skips are not compared here.
    command.env_remove("FIRECLAY_TEST_STRICT");
    command
}

/// The results that tests compute, by name, from a run of all of them.
fn coverage(folder: &Path) -> BTreeMap<String, Spot> {
    let log = folder.join("log");
    let mut command = this_binary();
    if crate::IS_THE_SUITE {
        command.arg(TESTS_IN_THE_SUITE);
    }
    let output = command.env("FIRECLAY_MUTATION_LOG", &log).output().expect("it starts");
    assert!(output.status.success(), "tests pass before: {}", String::from_utf8_lossy(&output.stdout));
    let mut spots: BTreeMap<String, Spot> = BTreeMap::new();
    let mut times: HashMap<String, [u128; 2]> = HashMap::new();
    for line in fs::read_to_string(&log).expect("a log").lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [test, name, computed, at] = fields[..] else { panic!("a line of the log: {line}") };
        let at: u128 = at.parse().expect("milliseconds");
        times.entry(test.into()).or_insert([at; 2])[1] = at;
        let spot = spots.entry(name.into()).or_default();
        spot.computed.insert(computed.into());
        if !["nothing", "declined"].contains(&computed) && !spot.tests.iter().any(|(_, known)| known == test) {
            spot.tests.push((0, test.into()));
        }
    }
    for spot in spots.values_mut() {
        for (time, test) in &mut spot.tests {
            let [begin, end] = times[test];
            *time = end - begin;
        }
        spot.tests.sort();
    }
    spots
}

#[test]
#[ignore = "runs all other tests many times over: `cargo test --features mutation --test parity -- --ignored`"]
fn every_corrupted_result_fails_a_test() {
    let start = Instant::now();
    let folder = tempfile::tempdir().expect("a folder");
    let spots = coverage(folder.path());
    let mut faults = Vec::new();

    // Every method is computed by some test, with every part of its result.
    let (mut declined, mut work) = (Vec::new(), Vec::new());
    for method in methods() {
        if WITHOUT_RESULT.contains(&&*method) || IN_THE_SUITE.contains(&&*method) != crate::IS_THE_SUITE {
            continue;
        }
        let own = |name: &str| name.split('.').next() == Some(&method);
        let parts: Vec<(&String, &Spot)> = spots.iter().filter(|(name, _)| own(name)).collect();
        match parts.is_empty() {
            // Plans for fused steps are declined here, so there are none to test.
            true if crate::IS_THE_SUITE => declined.push(method.clone()),
            true => faults.push(format!("{method}: no test computes it")),
            false => {}
        }
        for (name, spot) in parts {
            match spot.kinds() {
                kinds if !kinds.is_empty() => work.extend(kinds.into_iter().map(|kind| (name, kind, spot))),
                _ if spot.computed.contains("declined") => declined.push(name.clone()),
                _ if spots
                    .keys()
                    .any(|other| other.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('.'))) => {}
                _ => faults.push(format!("{name}: no test computes this part of the result")),
            }
        }
    }

    let (next, caught) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let missed = Mutex::new(Vec::new());
    let workers =
        if crate::backend_name() == "cpu" { std::thread::available_parallelism().map_or(1, usize::from) } else { 1 };
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((name, kind, spot)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let fails = |test: &str| {
                        let mut command = this_binary();
                        command.args(["--exact", test]).env("FIRECLAY_MUTATION", format!("{name}:{kind}"));
                        !command.output().expect("it starts").status.success()
                    };
                    match spot.tests.iter().find(|(_, test)| fails(test)) {
                        Some((_, test)) => caught.lock().expect("no panic").push(format!("{name}\t{kind}\t{test}")),
                        None => missed.lock().expect("no panic").push((name.to_string(), *kind, spot.tests.len())),
                    }
                }
            });
        }
    });

    let (mut caught, missed) = (caught.into_inner().expect("no panic"), missed.into_inner().expect("no panic"));
    caught.sort();
    println!("{}", caught.join("\n"));
    for (name, kind, tests) in missed {
        faults.push(format!("{name}, {kind}: none of the {tests} tests that compute it fails"));
    }
    declined.iter().for_each(|name| crate::skip::skip(&format!("this backend declines {name}")));
    let seconds = start.elapsed().as_secs();
    println!("{} mutations caught in {seconds} s, {} missed", caught.len(), faults.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
