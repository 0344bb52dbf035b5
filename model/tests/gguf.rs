//! GGUF files that are damaged: each is an error or a model, and no more memory is taken than the file could fill.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use burn::backend::NdArray;
use fireclay_model::ModelFolder;
use peak_alloc::PeakAlloc;

#[global_allocator]
static PEAK: PeakAlloc = PeakAlloc;

type B = NdArray;

/// Held by the test that measures.
static MEASURED: Mutex<()> = Mutex::new(());

/// Bytes that reading any of the small files here takes at the most.
const ROOM: usize = 64 << 20;

fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/gguf")).join(name);
    fs::read(path).expect("a golden file")
}

/// What comes of a file, after a check that it took no more than [`ROOM`].
fn read(path: &Path, bytes: &[u8], what: &str) -> Result<(), String> {
    fs::write(path, bytes).expect("writable");
    PEAK.reset_peak_usage();
    let before = PEAK.current_usage();
    let files = ModelFolder::new(path);
    let read = files.unknown_keys().and_then(|_| files.load::<B>(&Default::default()).map(|_| ()));
    let taken = PEAK.peak_usage().saturating_sub(before);
    assert!(taken < ROOM, "{what}: {taken} bytes");
    read.map_err(|error| {
        let message = error.to_string();
        assert!(message.contains("damaged.gguf") && !message.contains('\n'), "{what}: {message}");
        message
    })
}

#[test]
fn damaged_files_are_errors_and_take_no_memory() {
    let _guard = MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("damaged.gguf");
    for name in ["llama_mixed.gguf", "gpt2.gguf"] {
        let whole = golden(name);
        assert_eq!(read(&path, &whole, name), Ok(()));
        for length in (0..whole.len() - 64).step_by(211).chain(0..64) {
            let what = format!("{length} bytes of {name}");
            let message = read(&path, &whole[..length], &what).expect_err(&what);
            assert!(message.contains("truncated"), "{what}: {message}");
        }
        let header = whole.windows(4).rposition(|window| window == b"ight").expect("the last tensor's name") + 64;
        // What a model's tables of positions take is not the file's to say but within bounds, which are far above these.
        let context = whole.windows(14).position(|window| window == b"context_length").expect("a key") + 14 + 4;
        let mut errors = 0;
        for at in (0..header).filter(|at| !(context..context + 4).contains(at)) {
            let mut bytes = whole.clone();
            bytes[at] ^= [0xff, 0x01, 0x80, 0x10][at % 4];
            errors += usize::from(read(&path, &bytes, &format!("byte {at} of {name}")).is_err());
        }
        assert!(errors > header / 2, "{name}: {errors} errors of {header}");
    }
}

#[test]
fn absurd_counts_are_refused_before_anything_is_allocated() {
    let _guard = MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("damaged.gguf");
    let header = |tensors: u64, keys: u64, rest: &[u8]| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(keys.to_le_bytes());
        bytes.extend(rest);
        bytes.resize(bytes.len() + 100, 0);
        bytes
    };
    let key = |kind: u32, rest: &[u8]| [&1u64.to_le_bytes()[..], b"k", &kind.to_le_bytes(), rest].concat();
    let many = 1u64 << 60;
    let list = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    for (bytes, word) in [
        (header(many, 0, &[]), "1152921504606846976 tensors"),
        (header(0, many, &[]), "1152921504606846976 keys"),
        (header(0, u64::MAX, &[]), "18446744073709551615 keys"),
        (header(0, 1, &many.to_le_bytes()), "bytes of a key"),
        (header(0, 1, &key(8, &many.to_le_bytes())), "bytes of k"),
        (header(0, 1, &key(9, &list(4, many))), "values of k"),
        (header(0, 1, &key(9, &list(8, many))), "values of k"),
        (header(0, 1, &key(9, &list(9, 1))), "list of lists"),
        (header(0, 1, &key(13, &[])), "type 13"),
        (header(1, 0, &[]), "bytes of tensors"),
    ] {
        let message = read(&path, &bytes, word).expect_err(word);
        assert!(message.contains(word) || message.contains("general.architecture"), "{word}: {message}");
    }
}
