//! Sequence classification: an encoder gives each text one of several labels.

use std::path::Path;

use burn::tensor::Tensor;
use fireclay_datasets::{
    BatchKey, EncodedTexts, IGNORED_TARGET, LabelledBatch, LabelledText, LabelledTexts, PieceTokenizer, Tokenizer,
};
use fireclay_kernels::notices::{Level, notice};
use fireclay_kernels::{Backend, HeadLossOptions};
use fireclay_model::{ModelFolder, Tokens, Transformer, TransformerConfig, class_loss};

use super::held_out::parted;
use super::validation::{Validation, ValidationOutput};
use crate::failure::Failure;
use crate::inference::class_report::ClassReport;
use crate::inference::classification::{describe, encode, judge, logits, named, padding};
use crate::model_folder;
use crate::recipe::schema::{Recipe, TrainingRecipe};
use crate::recipe::task::ModelSizes;
use crate::run_folder::TOKENIZER;

/// Examples of a training part from which on a label for each text is an error.
const MANY: usize = 20;

/// Labelled examples in three parts, as tokens.
pub struct Classify {
    labels: Vec<String>,
    tokenizer: Tokenizer,
    train: EncodedTexts,
    valid: HeldOut,
    test: HeldOut,
    /// Examples of the training part that are truncated.
    cut: usize,
}

/// Examples for evaluation, with their labels, of which the model may not know all.
struct HeldOut {
    examples: EncodedTexts,
    labels: Vec<String>,
}

impl Classify {
    /// The examples of `recipe`. The order of the labels is that of the model to begin from, where it
    /// is a classifier for the same ones, else that of numbers or of text.
    pub(crate) fn begin(recipe: &Recipe, model: Option<&Path>) -> Result<Self, Failure> {
        let mut examples = examples(recipe)?;
        let tokenizer = match model {
            Some(model) => model_folder::tokenizer(model)?,
            None => new_tokenizer(recipe, &examples.train)?,
        };
        let numbers = sorted_labels(&examples.train, &recipe.data.source)?;
        let known = model.map(known_labels).transpose()?.flatten();
        // Numbers of the data are those of a model that knows other names.
        let keeps = known.as_ref().is_some_and(|known| !examples.has_names_of(known) && are_same(&numbers, known));
        let labels = if !keeps && examples.take_names() { examples.label_names.clone() } else { numbers };
        let labels = match known {
            Some(known) if are_same(&labels, &known) => known,
            _ => labels,
        };
        Self::new(examples, labels, tokenizer, recipe.training.seq_length)
    }

    /// The examples of `recipe`, with the tokenizer and labels of the model in `folder`.
    pub(crate) fn resume(recipe: &Recipe, folder: &Path) -> Result<Self, Failure> {
        let lacks = || Failure::new(format!("{}: the model has no labels", folder.display()));
        let labels = known_labels(folder)?.ok_or_else(lacks)?;
        let mut examples = examples(recipe)?;
        if examples.has_names_of(&labels) {
            examples.take_names();
        }
        Self::new(examples, labels, Tokenizer::load(&folder.join(TOKENIZER))?, recipe.training.seq_length)
    }

    /// Encodes examples in rows of up to `seq_length` tokens. Labels that are not among `labels`, nor
    /// their numbers, do not count in losses, and are never predicted.
    ///
    /// # Errors
    /// If the tokenizer lacks a part of a text, or a text has no tokens.
    pub fn new(
        examples: LabelledTexts,
        labels: Vec<String>,
        tokenizer: Tokenizer,
        seq_length: usize,
    ) -> Result<Self, Failure> {
        let padding = padding(&tokenizer);
        let encoded = |part: Vec<LabelledText>| {
            let contents: Vec<&str> = part.iter().map(|text| text.text.as_str()).collect();
            let (tokens, cut) = encode(&contents, &tokenizer, seq_length)?;
            if let Some(at) = tokens.iter().position(Vec::is_empty) {
                let text: String = contents[at].chars().take(60).collect();
                return Err(Failure::new(format!("the text '{text}' has no tokens")));
            }
            let names: Vec<String> = part.into_iter().map(|text| named(text.label, &labels)).collect();
            let number = |name: &String| labels.iter().position(|label| label == name);
            let number = |name| number(name).map_or(IGNORED_TARGET, |label| label as i32);
            let rows = tokens.into_iter().zip(names.iter().map(number)).collect();
            Ok((HeldOut { examples: EncodedTexts::new(rows, padding), labels: names }, cut))
        };
        let (train, cut) = encoded(examples.train)?;
        let ((valid, _), (test, _)) = (encoded(examples.valid)?, encoded(examples.test)?);
        for (part, held_out) in [("validation", &valid), ("test", &test)] {
            let unknown = held_out.labels.iter().filter(|label| !labels.contains(label)).count();
            if unknown > 0 {
                let text = format!("{unknown} examples of the {part} part have a label that the training part lacks");
                notice(Level::Warning, &text);
            }
        }
        Ok(Self { train: train.examples, labels, tokenizer, valid, test, cut })
    }

    pub(crate) fn sizes(&self) -> ModelSizes {
        let vocab_size = self.tokenizer.vocab_size();
        ModelSizes { vocab_size, labels: self.labels.clone(), ..ModelSizes::default() }
    }

    /// The labels, in the order of the logits.
    pub fn labels(&self) -> &[String] {
        &self.labels
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whether examples begin with a token that the tokenizer adds, such as `[CLS]`.
    pub(crate) fn begins_with_token(&self) -> Result<bool, Failure> {
        let (with, without) = (self.tokenizer.encode_prompt("")?, self.tokenizer.encode("")?);
        Ok(with.len() > without.len())
    }

    /// Whether the model in `folder` has a head for the same labels in the same order.
    pub(crate) fn has_head_of(&self, folder: &Path) -> Result<bool, Failure> {
        Ok(known_labels(folder)?.is_some_and(|labels| labels == self.labels))
    }

    pub(crate) fn batch(&self, key: BatchKey, rows: usize) -> LabelledBatch {
        self.train.batch(key, rows)
    }

    pub(crate) fn describe(&self, config: &TransformerConfig, training: &TrainingRecipe) -> String {
        let (rows, steps) = (training.batch_size * training.accumulation, training.steps);
        let (known, labels, count) = (config.vocab_size, self.labels.len(), self.train.len());
        let held_out = match self.test.examples.len() {
            0 => format!("{} for validation", self.valid.examples.len()),
            test => format!("{} for validation and {test} for the test", self.valid.examples.len()),
        };
        let cut = match self.cut {
            0 => String::new(),
            cut => format!(", {cut} of them truncated to {} tokens", training.seq_length),
        };
        let epochs = (steps as f64 * rows as f64) / count.max(1) as f64;
        format!(
            "vocabulary of {known} tokens; {labels} labels; {count} examples{cut}, {held_out}; {steps} steps of {rows} \
             examples ({epochs:.1} epochs)"
        )
    }

    /// Loss and scores on the validation part.
    pub(crate) fn validate<B: Backend>(
        &self,
        model: &Transformer<B>,
        device: &B::Device,
    ) -> Result<ValidationOutput, Failure> {
        let (loss, report) = self.judged(model, "validation", &self.valid, device)?;
        let validation = Validation { classes: Some(report.scores), ..Validation::of_loss(loss) };
        Ok(ValidationOutput { validation, confusions: report.confusions })
    }

    /// The report of `model` on the test part or, if the data has none, on the validation part.
    ///
    /// # Errors
    /// If the device fails.
    pub fn test<B: Backend>(&self, model: &Transformer<B>, device: &B::Device) -> Result<ClassReport, Failure> {
        let (part, examples) = match self.test.examples.is_empty() {
            true => ("validation", &self.valid),
            false => ("test", &self.test),
        };
        Ok(self.judged(model, part, examples, device)?.1)
    }

    fn judged<B: Backend>(
        &self,
        model: &Transformer<B>,
        part: &'static str,
        held_out: &HeldOut,
        device: &B::Device,
    ) -> Result<(f64, ClassReport), Failure> {
        judge(model, (part, &held_out.examples, &held_out.labels), &self.labels, device)
    }

    pub(crate) fn save(&self, folder: &Path) -> Result<(), Failure> {
        // The labels are in config.json.
        Ok(self.tokenizer.save(&folder.join(TOKENIZER))?)
    }

    pub(crate) fn checksum(&self) -> Result<String, Failure> {
        Ok(format!("{} {}", self.tokenizer.sha256()?, self.labels.join("\n")))
    }
}

/// Mean cross entropy of the labels, times the options' weight: `[1]`, in nats.
///
/// # Panics
/// If the model has no head for labels.
pub fn loss<B: Backend>(
    model: &Transformer<B>,
    batch: &LabelledBatch,
    options: HeadLossOptions,
    device: &B::Device,
) -> Tensor<B, 1> {
    loss_by(model, batch, options, device, |tokens| model.forward(tokens))
}

/// [`loss`] with the hidden states of `forward`.
pub(crate) fn loss_by<B: Backend>(
    model: &Transformer<B>,
    batch: &LabelledBatch,
    options: HeadLossOptions,
    device: &B::Device,
    forward: impl FnOnce(Tokens<B>) -> Tensor<B, 3>,
) -> Tensor<B, 1> {
    let logits = logits(model, batch, device, forward).expect("the model has a head for labels");
    let wanted = batch.wanted(logits.dims()[1], options.label_smoothing, options.weight, device);
    class_loss(logits, wanted)
}

/// The examples of a recipe, in parts: without a part for validation, a share of the others is held
/// out.
fn examples(recipe: &Recipe) -> Result<LabelledTexts, Failure> {
    let data = &recipe.data;
    if !data.corpora.is_empty() {
        return Err(Failure::usage("data.corpora: labelled examples are read from one file or folder, --data PATH"));
    }
    if data.source.is_empty() {
        return Err(recipe.lacks_data("examples with labels"));
    }
    let path = Path::new(&data.source);
    let mut examples = LabelledTexts::read(path, &data.field, &data.label_field)?;
    describe(&examples, path);
    if examples.valid.is_empty() {
        if examples.train.len() < 2 {
            return Err(Failure::new(format!("{}: one text is too few: one has to be held out", data.source)));
        }
        (examples.train, examples.valid) = parted(std::mem::take(&mut examples.train), recipe);
    }
    Ok(examples)
}

/// The tokenizer of a new model: trained on the examples, or that of a file.
fn new_tokenizer(recipe: &Recipe, examples: &[LabelledText]) -> Result<Tokenizer, Failure> {
    match (recipe.data.tokenizer.as_str(), recipe.tokenizer_file()) {
        ("pieces", _) => {
            let words = examples.iter().flat_map(|text| text.text.split_whitespace());
            Ok(PieceTokenizer::train_on(words, recipe.data.pieces)?.into_tokenizer())
        }
        (_, Some(file)) => Ok(Tokenizer::load(file)?),
        (other, None) => Err(Failure::usage(format!(
            "data.tokenizer is '{other}': the task classify takes pieces, which are trained on the examples, or the path \
             of a tokenizer.json; a pretrained encoder (--init MODEL) has its own"
        ))),
    }
}

/// The distinct labels: in the order of numbers if all are integers, else of text.
fn sorted_labels(examples: &[LabelledText], source: &str) -> Result<Vec<String>, Failure> {
    let mut labels: Vec<String> = examples.iter().map(|text| text.label.clone()).collect();
    labels.sort_unstable();
    labels.dedup();
    match labels.len() {
        1 => {
            return Err(Failure::new(format!(
                "{source}: all examples have the label '{}': there are no others",
                labels[0]
            )));
        }
        count if count == examples.len() && count > MANY => {
            return Err(Failure::new(format!(
                "{source}: each of {count} examples has another label: name the field of the label with label_field=NAME"
            )));
        }
        _ => {}
    }
    if labels.iter().all(|label| label.parse::<i64>().is_ok()) {
        labels.sort_by_key(|label| label.parse::<i64>().unwrap_or(0));
    }
    Ok(labels)
}

/// The labels of the classifier in `folder`, if it is one.
fn known_labels(folder: &Path) -> Result<Option<Vec<String>>, Failure> {
    let (_, config) = ModelFolder::new(folder).config()?;
    Ok(config.classifier.map(|head| head.labels))
}

/// Whether labels of data are those of a model, in any order: by name, or all its numbers, unless
/// its names are numbers themselves.
fn are_same(labels: &[String], known: &[String]) -> bool {
    let numbers = || {
        labels.iter().zip(0..).all(|(label, at)| *label == usize::to_string(&at))
            && known.iter().all(|label| label.parse::<i64>().is_err())
    };
    labels.len() == known.len() && (labels.iter().all(|label| known.contains(label)) || numbers())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_string()).collect()
    }

    #[test]
    fn labels_are_in_the_order_of_numbers_or_of_text() {
        let labels = |labels: &[&str]| {
            let text = |label: &&str| LabelledText { text: "a".into(), label: (*label).into() };
            sorted_labels(&labels.iter().map(text).collect::<Vec<_>>(), "data").map_err(|failure| failure.to_string())
        };
        assert_eq!(labels(&["10", "9", "10", "2"]), Ok(owned(&["2", "9", "10"])));
        assert_eq!(labels(&["b", "10", "a"]), Ok(owned(&["10", "a", "b"])));
        assert!(labels(&["x", "x"]).is_err_and(|message| message.contains("all examples have the label 'x'")));
        let many: Vec<String> = (0..30).map(|at| format!("text {at}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(labels(&many).is_err_and(|message| message.contains("each of 30 examples has another label")));
    }

    #[test]
    fn labels_of_a_model_are_the_same_by_name_or_as_all_its_numbers() {
        let known = owned(&["no", "yes"]);
        assert!(are_same(&owned(&["yes", "no"]), &known) && are_same(&owned(&["0", "1"]), &known));
        for other in [&["0", "2"][..], &["1", "2"], &["no", "maybe"], &["no"], &["0", "1", "2"]] {
            assert!(!are_same(&owned(other), &known), "{other:?}");
        }
        // Stars from 1 to 3 are not the numbers of labels.
        assert!(!are_same(&owned(&["0", "1", "2"]), &owned(&["1", "2", "3"])));
    }
}
