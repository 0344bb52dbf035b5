//! Host memory for GGUF files: valid ones a piece at a time; damaged ones, each of which gives an
//! error or a model, no more than the file could fill.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use burn::backend::NdArray;
use fireclay_model::ModelFolder;
use peak_alloc::PeakAlloc;

#[global_allocator]
static PEAK: PeakAlloc = PeakAlloc;

type B = NdArray;

/// Held by the measuring test.
static MEASURED: Mutex<()> = Mutex::new(());

/// Maximum bytes to read any of the small files here.
const ROOM: usize = 64 << 20;

fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/gguf")).join(name);
    fs::read(path).expect("a golden file")
}

/// The result of a file, after a check that it took no more than [`ROOM`].
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
        // A model's position tables are bounded independently of the file, far above these sizes.
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

/// A file of a one-block Llama in which only the embedding table has a size: the table in Q8_0, all
/// else in F32, all zeros.
fn zeros(path: &Path, vocab: u64, d: u64) {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let mut keys = [text("general.architecture"), 8u32.to_le_bytes().to_vec(), text("llama")].concat();
    let sizes = ["context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"];
    for (name, size) in sizes.into_iter().zip([32, d as u32, 1, d as u32, 1]) {
        keys.extend(
            [text(&format!("llama.{name}")), 4u32.to_le_bytes().to_vec(), size.to_le_bytes().to_vec()].concat(),
        );
    }
    let epsilon = "llama.attention.layer_norm_rms_epsilon";
    keys.extend([text(epsilon), 6u32.to_le_bytes().to_vec(), 1e-5f32.to_le_bytes().to_vec()].concat());
    let (mut tensors, mut offset, mut count) = (Vec::new(), 0u64, 0u64);
    let matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    let vectors =
        ["blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"].map(|name| (name.into(), 1));
    let matrices = matrices.map(|name| (format!("blk.0.{name}.weight"), d));
    for (name, rows) in [("token_embd.weight".to_string(), vocab)].into_iter().chain(matrices).chain(vectors) {
        let (kind, bytes) = if rows == vocab { (8u32, rows * d / 32 * 34) } else { (0, rows * d * 4) };
        let shape = if rows == 1 { vec![d] } else { vec![d, rows] };
        tensors.extend([text(&name), (shape.len() as u32).to_le_bytes().to_vec()].concat());
        tensors.extend(shape.iter().flat_map(|length| length.to_le_bytes()));
        tensors.extend([&kind.to_le_bytes()[..], &offset.to_le_bytes()].concat());
        offset += bytes.next_multiple_of(32);
        count += 1;
    }
    let counts = [count, 7].map(u64::to_le_bytes).concat();
    let header = [b"GGUF\x03\0\0\0".to_vec(), counts, keys, tensors].concat();
    fs::write(path, &header).expect("writable");
    let size = (header.len() as u64).next_multiple_of(32) + offset;
    fs::File::options().write(true).open(path).and_then(|file| file.set_len(size)).expect("writable");
}

#[test]
fn no_more_than_one_tensor_is_held_beside_the_model() {
    let _guard = MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("zeros.gguf");
    zeros(&path, 300_000, 128);
    PEAK.reset_peak_usage();
    let before = PEAK.current_usage();
    let model = ModelFolder::new(&path).load::<B>(&Default::default()).expect("a model");
    let (peak, kept) = (PEAK.peak_usage() - before, PEAK.current_usage() - before);
    assert!(kept > 4 * 300_000 * 128 && model.config().vocab_size == 300_000, "{kept} bytes are kept");
    let largest = 4 * 300_000 * 128;
    assert!(peak < kept + largest + ROOM, "{peak} bytes at the most, where the model takes {kept}");
}
