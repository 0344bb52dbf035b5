//! That Python finds in the module what it looks for; `python/tests/*.py` has the rest.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The module as it was built with this test.
fn module() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its binary");
    let deps = test.parent().expect("a folder");
    let name = format!("{}_native{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    [deps.join(&name), deps.with_file_name(name)].into_iter().find(|path| path.exists()).expect("the module is built")
}

#[test]
fn python_imports_the_module() {
    let has_numpy =
        |python: &mut Command| python.args(["-c", "import numpy"]).output().is_ok_and(|ran| ran.status.success());
    if !has_numpy(&mut Command::new("python3")) {
        eprintln!("skip 1: python_imports_the_module: there is no python3 with numpy");
        return;
    }
    let folder = std::env::temp_dir().join(format!("fireclay-import-{}", std::process::id()));
    let package = folder.join("fireclay");
    std::fs::create_dir_all(&package).expect("a folder");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("fireclay");
    for entry in std::fs::read_dir(sources).expect("the package").flatten().filter(|entry| entry.path().is_file()) {
        std::fs::copy(entry.path(), package.join(entry.file_name())).expect("a copy");
    }
    std::fs::copy(module(), package.join("_native.abi3.so")).expect("a copy");
    let code = "import fireclay; print([b.name for b in fireclay.devices() if b.built_in and not b.missing])";
    let ran = Command::new("python3").args(["-c", code]).env("PYTHONPATH", &folder).output().expect("Python runs");
    std::fs::remove_dir_all(&folder).expect("the folder exists");
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(said.contains("cpu"), "{said} {}", String::from_utf8_lossy(&ran.stderr));
}
