//! Hashes the kernels' sources, so that kernels compiled from other sources are never taken from a
//! cache.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=src");
    let mut sources = BTreeMap::new();
    read(Path::new("src"), &mut sources);
    let mut hasher = DefaultHasher::new();
    sources.hash(&mut hasher);
    println!("cargo:rustc-env=FIRECLAY_KERNEL_SOURCES={:016x}", hasher.finish());
}

fn read(folder: &Path, sources: &mut BTreeMap<String, String>) {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for path in entries.map(|entry| entry.expect("a readable folder").path()) {
        if path.is_dir() {
            read(&path, sources);
        } else if path.extension().is_none_or(|extension| extension != "md") {
            let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            sources.insert(path.display().to_string(), text);
        }
    }
}
