//! Labels of examples, predicted by a sequence classifier.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor};
use fireclay_datasets::{EncodedTexts, LabelledBatch, LabelledTexts, Tokenizer};
use fireclay_kernels::notices::{Level, notice};
use fireclay_kernels::{Backend, IGNORED_TARGET};
use fireclay_model::{ModelFolder, Tokens, Transformer, TransformerConfig};
use rayon::prelude::*;
use serde_json::Value;

use crate::backend::{OnBackend, RunContext};
use crate::device_read::recorded;
use crate::failure::Failure;
use crate::inference::class_report::ClassReport;
use crate::model_folder::{assert_known, tokenizer, warn_of_config};
use crate::precision::Precision;
use crate::run_folder::CONFIG;

/// Each text has one of several labels.
const PROBLEM: &str = "single_label_classification";
/// Examples per forward pass.
const BATCH_SIZE: usize = 64;

/// The label of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct PredictedLabel {
    /// The most probable label.
    pub label: String,
    /// Its probability.
    pub probability: f64,
}

/// A sequence classifier with its tokenizer.
pub struct Classifier<B: Backend> {
    model: Transformer<B>,
    labels: Vec<String>,
    tokenizer: Tokenizer,
    device: B::Device,
}

impl<B: Backend> Classifier<B> {
    /// Opens a model folder.
    ///
    /// # Errors
    /// If a file is missing or damaged, the model has no head for two or more labels of which a
    /// text has one, or the device lacks the precision.
    pub fn open(folder: &Path, precision: Precision, device: B::Device) -> Result<Self, Failure> {
        warn_of_config(folder)?;
        let model = precision.load::<B>(&ModelFolder::new(folder), &mut |_, _| {}, &device)?;
        let shown = folder.display();
        let labels = match &model.config().classifier {
            None => {
                return Err(Failure::new(format!(
                    "{shown}: no classifier: train one with `fireclay train --task classify`"
                )));
            }
            Some(head) if head.labels.len() < 2 => {
                return Err(Failure::new(format!(
                    "{shown}: its head has a single output, which is a score and no label: `fireclay serve` scores \
                     pairs with it"
                )));
            }
            Some(head) => head.labels.clone(),
        };
        if let Some(problem) = other_problem(folder)? {
            return Err(Failure::new(format!("{shown}: problem_type is {problem}; only {PROBLEM} is supported")));
        }
        Ok(Self { model, labels, tokenizer: tokenizer(folder)?, device })
    }

    /// The model.
    pub fn model(&self) -> &Transformer<B> {
        &self.model
    }

    /// The label of each text; `None` for a text without tokens. A text longer than the model's
    /// context is truncated.
    ///
    /// # Errors
    /// If a text has tokens that the model does not know, or the device fails.
    pub fn predict(&self, examples: &[&str]) -> Result<Vec<Option<PredictedLabel>>, Failure> {
        let (encoded, _) = self.encode(examples.iter().copied())?;
        let mut found = vec![None; examples.len()];
        let rows = encoded.into_iter().enumerate().filter(|(_, tokens)| !tokens.is_empty());
        let (places, rows): (Vec<usize>, Vec<_>) = rows.map(|(at, tokens)| (at, (tokens, IGNORED_TARGET))).unzip();
        let encoded = EncodedTexts::new(rows, padding(&self.tokenizer));
        each_odds(&self.model, &encoded, &self.device, |index, odds| {
            let best = argmax(odds);
            let label = self.labels[best].clone();
            found[places[index]] = Some(PredictedLabel { label, probability: odds[best].exp() });
        })?;
        Ok(found)
    }

    /// The tokens of each text, cut to the context, and how many are cut, which is reported.
    fn encode<'a>(&self, examples: impl Iterator<Item = &'a str>) -> Result<(Vec<Vec<u32>>, usize), Failure> {
        let config = self.model.config();
        let examples: Vec<&str> = examples.collect();
        let (encoded, cut) = encode(&examples, &self.tokenizer, config.context_length)?;
        for tokens in &encoded {
            assert_known(tokens, config.vocab_size, &self.tokenizer)?;
        }
        if cut > 0 {
            let (context, what) = (config.context_length, if cut == 1 { "example is" } else { "examples are" });
            notice(Level::Warning, &format!("{cut} {what} truncated to the model's context of {context} tokens"));
        }
        Ok((encoded, cut))
    }
}

/// Whether the model of `config` in `folder` gives a text one of several labels.
///
/// # Errors
/// If `config.json` cannot be read.
pub(crate) fn classifies(folder: &Path, config: &TransformerConfig) -> Result<bool, Failure> {
    let several = config.classifier.as_ref().is_some_and(|head| head.labels.len() > 1);
    Ok(several && other_problem(folder)?.is_none())
}

/// The `problem_type` of a folder's `config.json`, if it is not [`PROBLEM`].
fn other_problem(folder: &Path) -> Result<Option<String>, Failure> {
    let file = folder.join(CONFIG);
    let text = std::fs::read_to_string(&file).map_err(Failure::io(&file))?;
    let config: Value = serde_json::from_str(&text)
        .map_err(|error| Failure::new(format!("{}: not valid JSON: {error}", file.display())))?;
    Ok(config["problem_type"].as_str().filter(|problem| *problem != PROBLEM).map(str::to_string))
}

/// The tokens of each text, at most `longest`, and how many examples are truncated.
pub(crate) fn encode(
    examples: &[&str],
    tokenizer: &Tokenizer,
    longest: usize,
) -> Result<(Vec<Vec<u32>>, usize), Failure> {
    let encoded = examples.par_iter().map(|text| tokenizer.encode_truncated(text, longest));
    let encoded: Vec<(Vec<u32>, bool)> = encoded.collect::<Result<_, _>>()?;
    let cut = encoded.iter().filter(|(_, cut)| *cut).count();
    Ok((encoded.into_iter().map(|(tokens, _)| tokens).collect(), cut))
}

/// The token that pads rows: it is not attended to, and may be any.
pub(crate) fn padding(tokenizer: &Tokenizer) -> u32 {
    ["[PAD]", "<pad>"].iter().find_map(|name| tokenizer.token_id(name)).unwrap_or(0)
}

fn argmax(odds: &[f64]) -> usize {
    odds.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(index, _)| index)
}

/// Logits of a batch, f32 `[batch_size, labels]`; `None` if the model has no head for labels.
pub(crate) fn logits<B: Backend>(
    model: &Transformer<B>,
    batch: &LabelledBatch,
    device: &B::Device,
    forward: impl FnOnce(Tokens<B>) -> Tensor<B, 3>,
) -> Option<Tensor<B, 2>> {
    let batch = batch.to_device::<B>(device);
    let hidden = forward(Tokens::from(batch.ids).with_lengths(batch.lengths.clone()));
    model.classify(hidden, Some(batch.lengths))
}

/// Hands the log-probabilities of all labels to `each`, with the index of the text.
fn each_odds<B: Backend>(
    model: &Transformer<B>,
    examples: &EncodedTexts,
    device: &B::Device,
    mut each: impl FnMut(usize, &[f64]),
) -> Result<(), Failure> {
    for (indices, batch) in examples.batches(BATCH_SIZE) {
        let logits = logits(model, &batch, device, |tokens| model.forward(tokens));
        let logits = logits.ok_or_else(|| Failure::new("the model has no head for labels"))?;
        let count = logits.dims()[1];
        let data = recorded(logits.cast(DType::F32).try_into_data());
        let data = data.map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
        let values: Vec<f64> = data.iter::<f64>().collect();
        for (index, row) in indices.into_iter().zip(values.chunks_exact(count)) {
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.iter().map(|logit| (logit - largest).exp()).sum();
            let odds: Vec<f64> = row.iter().map(|logit| logit - largest - sum.ln()).collect();
            if !odds.iter().all(|odds| odds.is_finite()) {
                return Err(Failure::new("the model's output is not a number: its weights are damaged"));
            }
            each(index, &odds);
        }
    }
    Ok(())
}

/// Compares the predictions for `examples` with `expected`, the label of each; the mean loss, in nats,
/// of those whose label the model knows.
///
/// # Errors
/// If the model has no head for `labels`, or the device fails.
pub(crate) fn judge<B: Backend>(
    model: &Transformer<B>,
    (part, examples, expected): (&'static str, &EncodedTexts, &[String]),
    labels: &[String],
    device: &B::Device,
) -> Result<(f64, ClassReport), Failure> {
    let mut predicted = vec![0; examples.len()];
    let (mut loss, mut known) = (0.0, 0);
    each_odds(model, examples, device, |index, odds| {
        predicted[index] = argmax(odds);
        if let Some(own) = labels.iter().position(|label| *label == expected[index]) {
            loss -= odds[own];
            known += 1;
        }
    })?;
    let pairs = expected.iter().zip(&predicted).map(|(label, found)| (label.as_str(), labels[*found].as_str()));
    Ok((loss / f64::from(known.max(1)), ClassReport::new(part, pairs)))
}

/// An evaluation of a classifier on labelled examples, for any backend.
#[derive(Clone, Debug)]
pub struct ClassEvaluationRun {
    /// The model folder.
    pub model: PathBuf,
    /// A file or folder of records; of a folder with parts, the part `test` is read, else
    /// validation.
    pub data: PathBuf,
    /// The field of the text; empty to recognise it.
    pub field: String,
    /// The field of the label; empty to recognise it.
    pub label_field: String,
    /// Data type of matrices and activations.
    pub precision: Precision,
}

/// Its result.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassEvaluation {
    /// Mean loss in nats, of the examples whose label the model knows.
    pub loss: f64,
    /// The scores.
    pub report: ClassReport,
    /// Time of the passes.
    pub elapsed: Duration,
}

impl OnBackend for ClassEvaluationRun {
    type Output = ClassEvaluation;

    fn run<B: Backend>(self, RunContext { device, .. }: RunContext<B>) -> Result<ClassEvaluation, Failure> {
        let Self { model, data, field, label_field, precision } = self;
        let classifier = Classifier::<B>::open(&model, precision, device)?;
        let mut examples = LabelledTexts::read(&data, &field, &label_field)?;
        describe(&examples, &data);
        let labels = &classifier.labels;
        if examples.has_names_of(labels) {
            examples.take_names();
        }
        let (part, examples) = match examples {
            LabelledTexts { test, .. } if !test.is_empty() => ("test", test),
            LabelledTexts { valid, .. } if !valid.is_empty() => ("validation", valid),
            LabelledTexts { train, .. } => ("all", train),
        };
        let (encoded, _) = classifier.encode(examples.iter().map(|text| text.text.as_str()))?;
        if encoded.iter().any(Vec::is_empty) {
            return Err(Failure::new(format!("{}: a text has no tokens", data.display())));
        }
        let expected: Vec<String> = examples.into_iter().map(|text| named(text.label, labels)).collect();
        let unknown = expected.iter().filter(|label| !labels.contains(label)).count();
        if unknown == expected.len() {
            let (first, known) = (&expected[0], labels.join(", "));
            return Err(Failure::new(format!(
                "{}: no label is known to the model: the first is '{first}', known are {known}",
                data.display()
            )));
        }
        if unknown > 0 {
            notice(Level::Warning, &format!("{unknown} examples have a label that the model does not know"));
        }
        let rows = encoded.into_iter().map(|tokens| (tokens, IGNORED_TARGET)).collect();
        let rows = EncodedTexts::new(rows, padding(&classifier.tokenizer));
        let begun = Instant::now();
        let (loss, report) = judge(&classifier.model, (part, &rows, &expected), labels, &classifier.device)?;
        Ok(ClassEvaluation { loss, report, elapsed: begun.elapsed() })
    }
}

/// The name of a label among `labels`: if none of these is an integer, an integer is the number of
/// one.
pub(crate) fn named(label: String, labels: &[String]) -> String {
    if labels.contains(&label) || labels.iter().any(|label| label.parse::<i64>().is_ok()) {
        return label;
    }
    let by_number = label.parse::<usize>().ok().and_then(|at| labels.get(at));
    by_number.cloned().unwrap_or(label)
}

/// Reports which fields were found, and what was left out.
pub(crate) fn describe(examples: &LabelledTexts, data: &Path) {
    let LabelledTexts { text_field, label_field, left_out, other_files, .. } = examples;
    let mut told = format!("{}: text in the field '{text_field}', labels in '{label_field}'", data.display());
    if *left_out > 0 {
        told += &format!("; {left_out} records without a text, or whose label is missing or negative, are left out");
    }
    let mut names = other_files.iter().filter_map(|file| file.file_name()).map(|name| name.to_string_lossy());
    if let Some(first) = names.next() {
        let more = match names.count() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        told += &format!("; files that belong to no part are left out: {first}{more}");
    }
    notice(Level::Info, &told);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_numbers_of_labels_unless_labels_are_integers() {
        let labels = |names: [&str; 2]| names.map(String::from).to_vec();
        assert_eq!(named("1".into(), &labels(["no", "yes"])), "yes");
        assert_eq!(named("no".into(), &labels(["no", "yes"])), "no");
        assert_eq!(named("2".into(), &labels(["no", "yes"])), "2", "no such label");
        assert_eq!(named("0".into(), &labels(["1", "2"])), "0", "an unknown one");
        assert_eq!(named("1".into(), &labels(["1", "2"])), "1");
    }
}
