//! The data and tokenizer at the start of a run, to notice when they change.

use std::path::Path;

use fireclay_datasets::Inputs;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::recipe::schema::{EMBEDDED, Recipe};
use crate::token_cache::inputs;

/// The inputs of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The data; none if it is embedded.
    pub data: Option<Inputs>,
    /// The corpora of a mixture, in the recipe's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub corpora: Vec<Inputs>,
    /// The tokenizer; none if the run trains its own.
    pub tokenizer: Option<Inputs>,
}

impl Origin {
    /// The files named by `recipe`, in their current state. Files that look as in `known` are not
    /// hashed again.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn of(recipe: &Recipe, known: Option<&Self>) -> Result<Self, Failure> {
        let data = &recipe.data;
        let named = |name: &str, known: &[&str]| !name.is_empty() && !known.contains(&name);
        let known = |name: &str| {
            let known = known.into_iter().flat_map(|origin| origin.data.iter().chain(&origin.corpora));
            known.into_iter().find(|inputs| inputs.path == Path::new(name))
        };
        let of = |name: &str| inputs(Path::new(name), known(name));
        Ok(Self {
            data: named(&data.source, &EMBEDDED).then(|| of(&data.source)).transpose()?,
            corpora: data.corpora.keys().map(|name| of(name)).collect::<Result<_, _>>()?,
            tokenizer: recipe.tokenizer_file().map(|file| inputs(file, None)).transpose()?,
        })
    }

    /// The differences to `now`, in words.
    pub fn changes(&self, now: &Self) -> Vec<String> {
        let single = [("data", &self.data, &now.data), ("tokenizer", &self.tokenizer, &now.tokenizer)];
        let single = single.into_iter().filter_map(|(name, then, now)| change(name, then.as_ref(), now.as_ref()));
        let count = self.corpora.len().max(now.corpora.len());
        let corpora = (0..count).filter_map(|at| change("corpus", self.corpora.get(at), now.corpora.get(at)));
        single.chain(corpora).collect()
    }
}

fn change(name: &str, then: Option<&Inputs>, now: Option<&Inputs>) -> Option<String> {
    let shown = |inputs: Option<&Inputs>| inputs.map_or("none".to_string(), |inputs| inputs.path.display().to_string());
    match (then, now) {
        (Some(then), Some(now)) if then.sha256 == now.sha256 => None,
        (None, None) => None,
        (Some(then), Some(now)) if then.path == now.path => Some(format!(
            "the {name} in {} changed (sha256 was {:.12}, is {:.12})",
            shown(Some(now)),
            then.sha256,
            now.sha256
        )),
        _ => Some(format!("the {name} changed from {} to {}", shown(then), shown(now))),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_changed_file_is_told_and_a_moved_one_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let (a, b) = (folder.path().join("a.txt"), folder.path().join("b.txt"));
        fs::write(&a, "one").expect("writable");
        fs::copy(&a, &b).expect("writable");
        let of = |path: &Path| Origin { data: Some(Inputs::of(path, None).expect("readable")), ..Origin::default() };
        let then = of(&a);
        assert!(then.changes(&of(&a)).is_empty() && then.changes(&of(&b)).is_empty());
        fs::write(&a, "two").expect("writable");
        let changes = then.changes(&of(&a));
        assert!(
            changes.len() == 1 && changes[0].contains("a.txt") && changes[0].contains("changed (sha256 was"),
            "{changes:?}"
        );
        let changes = then.changes(&Origin::default());
        assert!(changes.len() == 1 && changes[0].contains("none"), "{changes:?}");
    }
}
