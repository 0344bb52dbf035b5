//! The data and the tokenizer that a run began with, so that it does not go on with others unawares.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::failure::Failure;
use crate::training::recipe::schema::{EMBEDDED, Recipe};

/// A file or folder, and what is in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Its full path.
    pub path: PathBuf,
    /// Of its bytes; of a folder, of its files' names and bytes in the order of their paths.
    pub sha256: String,
}

/// What a run learns from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The data; none where it is in the program itself.
    pub data: Option<Source>,
    /// The tokenizer; none where the run makes its own.
    pub tokenizer: Option<Source>,
}

impl Origin {
    /// Of the files that `recipe` names, as they are now.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn of(recipe: &Recipe) -> Result<Self, Failure> {
        let made = ["byte", "char", "bpe", "pieces"];
        let data = &recipe.data;
        let named = |name: &str, known: &[&str]| !name.is_empty() && !known.contains(&name);
        Ok(Self {
            data: named(&data.source, &EMBEDDED).then(|| Source::of(Path::new(&data.source))).transpose()?,
            tokenizer: named(&data.tokenizer, &made).then(|| Source::of(Path::new(&data.tokenizer))).transpose()?,
        })
    }

    /// What differs now, in words; nothing where all is as it was.
    pub fn changes(&self, now: &Self) -> Vec<String> {
        let changes = [("data", &self.data, &now.data), ("tokenizer", &self.tokenizer, &now.tokenizer)];
        changes.into_iter().filter_map(|(name, then, now)| change(name, then.as_ref(), now.as_ref())).collect()
    }
}

fn change(name: &str, then: Option<&Source>, now: Option<&Source>) -> Option<String> {
    let shown = |source: Option<&Source>| source.map_or("none".to_string(), |source| source.path.display().to_string());
    match (then, now) {
        (Some(then), Some(now)) if then.sha256 == now.sha256 => None,
        (None, None) => None,
        (Some(then), Some(now)) if then.path == now.path => Some(format!(
            "the {name} in {} is not what it was (sha256 {:.12}, now {:.12})",
            shown(Some(now)),
            then.sha256,
            now.sha256
        )),
        _ => Some(format!("the {name} was {} and is now {}", shown(then), shown(now))),
    }
}

impl Source {
    fn of(path: &Path) -> Result<Self, Failure> {
        let full = fs::canonicalize(path).map_err(Failure::io(path))?;
        let mut hash = Sha256::new();
        if full.is_dir() {
            for file in files(&full)? {
                let name = file.strip_prefix(&full).unwrap_or(&file).to_string_lossy().into_owned();
                hash.update(name.as_bytes());
                hash.update([0]);
                add(&mut hash, &file)?;
            }
        } else {
            add(&mut hash, &full)?;
        }
        let sha256 = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { path: full, sha256 })
    }
}

/// The files below a folder that training may read, in the order of their paths: none whose name begins with a dot.
fn files(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(Failure::io(folder))? {
        let entry = entry.map_err(Failure::io(folder))?;
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        let path = entry.path();
        match path.is_dir() {
            true => found.extend(files(&path)?),
            false => found.push(path),
        }
    }
    found.sort();
    Ok(found)
}

fn add(hash: &mut Sha256, file: &Path) -> Result<(), Failure> {
    let mut open = File::open(file).map_err(Failure::io(file))?;
    let mut bytes = vec![0; 1 << 20];
    loop {
        match open.read(&mut bytes).map_err(Failure::io(file))? {
            0 => return Ok(()),
            count => hash.update(&bytes[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_told_and_a_moved_one_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let (a, b) = (folder.path().join("a.txt"), folder.path().join("b.txt"));
        fs::write(&a, "one").expect("writable");
        fs::copy(&a, &b).expect("writable");
        let of = |path: &Path| Origin { data: Some(Source::of(path).expect("readable")), tokenizer: None };
        let then = of(&a);
        assert!(then.changes(&of(&a)).is_empty() && then.changes(&of(&b)).is_empty());
        fs::write(&a, "two").expect("writable");
        let changes = then.changes(&of(&a));
        assert!(
            changes.len() == 1 && changes[0].contains("a.txt") && changes[0].contains("is not what it was"),
            "{changes:?}"
        );
        let changes = then.changes(&Origin::default());
        assert!(changes.len() == 1 && changes[0].contains("none"), "{changes:?}");
        // The order in which a folder lists its files does not matter, their names do.
        let whole = of(folder.path());
        assert_eq!(whole, of(folder.path()));
        fs::rename(&b, folder.path().join("c.txt")).expect("writable");
        assert_ne!(whole, of(folder.path()));
    }
}
