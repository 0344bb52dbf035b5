//! Comparison of runs.

use std::path::Path;

use serde_json::{Value, json};

use super::{Run, page};
use crate::failure::Failure;
use crate::plots::{Svg, curves};
use crate::run_folder::write_atomic;

/// Several runs to compare.
#[derive(Clone, Debug)]
pub struct Comparison {
    runs: Vec<Run>,
    /// Their names: the shortest path suffixes that differ.
    names: Vec<String>,
}

/// A setting and its value in each run, if set.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Its full name.
    pub setting: String,
    /// In the order of the runs.
    pub values: Vec<Option<Value>>,
}

impl Comparison {
    /// Compares runs, in order.
    pub fn new(runs: Vec<Run>) -> Self {
        let parts = |run: &Run, count: usize| {
            let all: Vec<String> =
                run.folder.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
            all[all.len().saturating_sub(count)..].join("/")
        };
        let deepest = runs.iter().map(|run| run.folder.components().count()).max().unwrap_or(1);
        let differ = |count: &usize| {
            let mut names: Vec<String> = runs.iter().map(|run| parts(run, *count)).collect();
            names.sort();
            names.windows(2).all(|pair| pair[0] != pair[1])
        };
        let count = (1..deepest).find(differ).unwrap_or(deepest);
        let names = runs.iter().map(|run| parts(run, count)).collect();
        Self { runs, names }
    }

    /// The runs' names.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The runs.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The settings that differ.
    pub fn differences(&self) -> Vec<Difference> {
        let settings: Vec<_> = self.runs.iter().map(Run::settings).collect();
        let mut names: Vec<&String> = settings.iter().flat_map(|settings| settings.keys()).collect();
        names.sort();
        names.dedup();
        let difference = |name: &String| {
            let values: Vec<Option<Value>> = settings.iter().map(|settings| settings.get(name).cloned()).collect();
            let differ = values.windows(2).any(|pair| pair[0] != pair[1]);
            differ.then(|| Difference { setting: name.clone(), values })
        };
        names.into_iter().filter_map(difference).collect()
    }

    /// Plots validation losses, or training losses of runs without validation.
    ///
    /// # Errors
    /// If no run has a loss.
    pub fn picture(&self) -> Result<Svg, Failure> {
        let losses = self.runs.iter().zip(&self.names).map(|(run, name)| {
            let valid = run.curve(name, "valid", "loss");
            if valid.points.is_empty() { run.curve(name, "train", "loss") } else { valid }
        });
        let losses: Vec<_> = losses.filter(|curve| !curve.points.is_empty()).collect();
        curves("", ["step", "validation loss, nats"], &losses)
    }

    /// Writes a page with all runs.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_page(&self, file: &Path) -> Result<(), Failure> {
        let named = self.runs.iter().zip(&self.names).map(|(run, name)| Run { folder: name.into(), ..run.clone() });
        let named: Vec<Run> = named.collect();
        write_atomic(file, page::page(&self.names.join(", "), &named).as_bytes())
    }

    /// A text table: results and differing settings.
    pub fn table(&self) -> String {
        let number =
            |value: Option<f64>, digits: usize| value.map_or("-".to_string(), |value| format!("{value:.digits$}"));
        let figures = |of: &dyn Fn(&Run) -> String| self.runs.iter().map(of).collect::<Vec<_>>();
        let mut rows = vec![
            (String::new(), self.names.clone()),
            ("status".into(), figures(&|run| run.status().as_str().to_string())),
            ("steps".into(), figures(&|run| run.step().to_string())),
            ("best validation loss".into(), figures(&|run| number(run.best().map(|best| best.1), 4))),
            ("at step".into(), figures(&|run| run.best().map_or("-".to_string(), |best| best.0.to_string()))),
            ("tokens/s".into(), figures(&|run| number(run.tokens_per_second(), 0))),
        ];
        let shown = |value: &Option<Value>| match value {
            None => "-".to_string(),
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
        };
        rows.extend(
            self.differences().iter().map(|difference| {
                (difference.setting.clone(), difference.values.iter().map(shown).collect::<Vec<_>>())
            }),
        );
        let width = |text: &str| text.chars().count();
        let first = rows.iter().map(|(name, _)| width(name)).max().unwrap_or(0);
        let columns: Vec<usize> = (0..self.runs.len())
            .map(|at| rows.iter().map(|(_, values)| width(&values[at])).max().unwrap_or(0))
            .collect();
        let line = |(name, values): &(String, Vec<String>)| {
            let values: Vec<String> =
                values.iter().zip(&columns).map(|(value, width)| format!("{value:>width$}")).collect();
            format!("{name:<first$}  {}", values.join("  ")).trim_end().to_string()
        };
        rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// As JSON, one line per run.
    pub fn to_json(&self) -> Vec<Value> {
        let differences = self.differences();
        let of_run = |(at, (run, name)): (usize, (&Run, &String))| {
            let settings: serde_json::Map<String, Value> = differences
                .iter()
                .map(|difference| (difference.setting.clone(), difference.values[at].clone().unwrap_or(Value::Null)))
                .collect();
            json!({
                "event": "run", "name": name, "folder": run.folder.display().to_string(),
                "status": run.status().as_str(), "step": run.step(), "best_step": run.best().map(|best| best.0),
                "best_valid_loss": run.best().map(|best| best.1), "tokens_per_second": run.tokens_per_second(),
                "differs_in": settings,
            })
        };
        self.runs.iter().zip(&self.names).enumerate().map(of_run).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use fireclay_model::TransformerConfig;

    use super::*;
    use crate::recipe::Recipe;
    use crate::runs::record::RunRecord;

    fn run(folder: &Path, rate: &str, losses: [f64; 2]) -> Run {
        fs::create_dir_all(folder).expect("a folder");
        let recipe = Recipe::shipped("stories").and_then(|recipe| recipe.with("learning_rate", rate)).expect("good");
        let config = TransformerConfig::gpt2(10, 8, 8, 1, 1);
        RunRecord::new(&recipe, &config, "CPU".into(), vec!["train".into()]).write(folder, None).expect("writable");
        let lines = losses.iter().enumerate().map(|(at, loss)| {
            format!(
                "{}\n{}\n",
                json!({"event": "train", "step": at + 1, "loss": 9.0, "tokens_per_second": 10.0}),
                json!({"event": "valid", "step": at + 1, "loss": loss})
            )
        });
        fs::write(folder.join("metrics.jsonl"), lines.collect::<String>()).expect("writable");
        Run::read(folder).expect("a run")
    }

    #[test]
    fn runs_are_named_by_what_tells_them_apart_and_only_differences_are_listed() {
        let folder = tempfile::tempdir().expect("a folder");
        let a = run(&folder.path().join("a/seed-1"), "0.001", [3.0, 2.0]);
        let b = run(&folder.path().join("b/seed-1"), "0.003", [2.5, 2.75]);
        let both = Comparison::new(vec![a, b]);
        assert_eq!(both.names(), ["a/seed-1", "b/seed-1"]);
        let differences = both.differences();
        assert_eq!(differences.len(), 1, "{differences:?}");
        assert_eq!(differences[0].setting, "training.learning_rate");
        let table = both.table();
        for text in ["a/seed-1", "2.0000", "2.5000", "training.learning_rate", "0.001", "0.003", "stopped"] {
            assert!(table.contains(text), "{text} is not in\n{table}");
        }
        let json = both.to_json();
        assert_eq!(json[1]["best_step"], 1);
        assert_eq!(json[1]["differs_in"]["training.learning_rate"], 0.003);
        let picture = both.picture().expect("losses");
        assert!(picture.as_str().contains("b/seed-1"));
        let page = folder.path().join("compare.html");
        both.write_page(&page).expect("writable");
        let page = fs::read_to_string(page).expect("a page");
        assert!(page.contains("a/seed-1") && page.contains("0.003") && !page.contains("http://"), "one file");
    }

    #[test]
    fn what_a_run_says_cannot_end_the_pages_script() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut run = run(folder.path(), "0.001", [1.0, 2.0]);
        run.events.push(json!({"event": "sample", "step": 2, "text": "</script><b>&"}));
        let page = page::page("<i>", &[run]);
        assert_eq!(page.matches("</script>").count(), 2, "the page's own");
        assert!(page.contains("<title>&lt;i&gt;</title>"));
    }
}
