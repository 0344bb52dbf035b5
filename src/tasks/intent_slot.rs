//! Intent and slot prediction for utterances.
//!
//! An utterance is tokenized into pieces of words after a `[CLS]` piece. Its intent is predicted at
//! `[CLS]`, the tag of a word at its first piece.

use std::path::Path;

use burn::tensor::Tensor;
use fireclay_datasets::{
    BatchKey, EMBEDDED_NAMES, EncodedUtterances, Labels, PieceTokenizer, Utterance, UtteranceBatch, Utterances,
    Variation,
};
use fireclay_kernels::{Backend, HeadLossOptions};
use fireclay_model::{Tokens, Transformer, TransformerConfig, UtteranceTargets};

use super::counts::TargetCounts;
use super::scores::{ClassificationReport, Prediction, TrainedValues};
use super::validation::{Validation, ValidationOutput};
use crate::device_read::read_scalars;
use crate::failure::Failure;
use crate::inference::tagging::{Decoder, Predictions, heads, read_labels};
use crate::recipe::{ModelSizes, Recipe, TrainingRecipe};
use crate::run_folder::{LABELS, TOKENIZER, write_atomic};

/// Utterances in three splits, encoded.
pub struct IntentSlot {
    labels: Labels,
    pieces: PieceTokenizer,
    train: EncodedUtterances,
    valid: HeldOut,
    test: HeldOut,
    trained: TrainedValues,
}

/// Utterances for evaluation.
struct HeldOut {
    utterances: Vec<Utterance>,
    encoded: EncodedUtterances,
}

/// Evaluation batch size.
const BATCH_SIZE: usize = 64;

impl IntentSlot {
    /// Encodes utterances in rows of up to `seq_length` pieces, with the labels of the training
    /// split.
    ///
    /// # Errors
    /// If the tokenizer refuses a word.
    pub fn new(
        utterances: Utterances,
        labels: Labels,
        pieces: PieceTokenizer,
        seq_length: usize,
    ) -> Result<Self, Failure> {
        let encode = |part: &[Utterance]| EncodedUtterances::new(part, &labels, &pieces, seq_length);
        let (train, trained) = (encode(&utterances.train)?, TrainedValues::of(&utterances.train));
        let held_out = |part: Vec<Utterance>| {
            let encoded = encode(&part)?;
            Ok::<_, Failure>(HeldOut { utterances: part, encoded })
        };
        let (valid, test) = (held_out(utterances.valid)?, held_out(utterances.test)?);
        Ok(Self { labels, pieces, train, valid, test, trained })
    }

    /// The utterances of `recipe`, with the labels of their training split.
    pub(crate) fn begin(recipe: &Recipe) -> Result<Self, Failure> {
        let utterances = utterances(recipe)?;
        let pieces = match (&recipe.init, recipe.data.tokenizer.as_str()) {
            (Some(model), _) if model.is_file() => {
                return Err(Failure::usage(format!(
                    "{}: cannot initialize an encoder from a GGUF file",
                    model.display()
                )));
            }
            (Some(model), _) => PieceTokenizer::load(&model.join(TOKENIZER))?,
            // The default is for text.
            (None, "pieces" | "byte") => PieceTokenizer::train(&utterances.train, recipe.data.pieces)?,
            (None, file) => PieceTokenizer::load(Path::new(file))?,
        };
        let labels = Labels::of(&utterances.train);
        let labels = match &recipe.init {
            None if recipe.data.word_types => labels.with_word_types(&utterances.train),
            None => labels,
            // A pretrained model has its types.
            Some(model) => match model.join(LABELS) {
                file if file.exists() => labels.with_types_of(read_labels(&file)?),
                _ => labels,
            },
        };
        let labels = if recipe.data.joint_decoding { labels.with_intent_slots(&utterances.train) } else { labels };
        Self::new(utterances, labels, pieces, recipe.training.seq_length)
    }

    /// The utterances of `recipe`, with the tokenizer and labels in `folder`.
    pub(crate) fn resume(recipe: &Recipe, folder: &Path) -> Result<Self, Failure> {
        let utterances = utterances(recipe)?;
        let (pieces, labels) = (PieceTokenizer::load(&folder.join(TOKENIZER))?, read_labels(&folder.join(LABELS))?);
        Self::new(utterances, labels, pieces, recipe.training.seq_length)
    }

    /// Whether the model in `folder` has heads for the same labels.
    pub(crate) fn has_labels_of(&self, folder: &Path) -> Result<bool, Failure> {
        let file = folder.join(LABELS);
        if !file.exists() {
            return Ok(false);
        }
        Ok(read_labels(&file)?.same_names(&self.labels))
    }

    pub(crate) fn describe(&self, config: &TransformerConfig, training: &TrainingRecipe) -> String {
        let rows = training.batch_size * training.accumulation;
        let (known, count, seq_length) = (config.vocab_size, self.train_count(), training.seq_length);
        let (intents, slots) = (self.labels.intents.len(), self.labels.slots.len());
        let cut = match self.cut_count() {
            0 => String::new(),
            cut => format!(" ({cut} are truncated to {seq_length} pieces)"),
        };
        let steps = training.steps;
        let words = match self.labels.words.len() {
            0 => String::new(),
            words => format!(" and of {words} words that occur more than once"),
        };
        let open: Vec<String> = self.train.open_slots().into_iter().map(|tag| self.labels.tag(tag)).collect();
        let open: Vec<&str> = open.iter().filter_map(|tag| tag.strip_prefix("B-")).collect();
        let splices = training.splice_values > 0.0 && training.swap_values > 0.0;
        let open = match (open.len(), splices || training.hide_values > 0.0) {
            (_, false) => String::new(),
            (0, true) => ", none of them open".to_string(),
            (number, true) => format!(", {number} of them open ({}), whose values are varied,", open.join(", ")),
        };
        format!(
            "vocabulary of {known} pieces{words}; {intents} intents, {slots} slots{open} in {count} utterances{cut}; \
             {steps} steps of {rows} utterances"
        )
    }

    /// The known intents and slots.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    pub(crate) fn checksum(&self) -> Result<String, Failure> {
        let labels = serde_json::to_string(&self.labels).map_err(|error| Failure::new(error.to_string()))?;
        Ok(format!("{} {labels}", self.pieces.sha256()?))
    }

    /// Number of training utterances.
    pub fn train_count(&self) -> usize {
        self.train.len()
    }

    /// Number of test utterances; none if the data has no test split.
    pub fn test_count(&self) -> usize {
        self.test.utterances.len()
    }

    /// Number of utterances truncated to a row.
    pub fn cut_count(&self) -> usize {
        self.train.cut()
    }

    pub(crate) fn sizes(&self) -> ModelSizes {
        ModelSizes::of_utterances(&self.labels, &self.pieces)
    }

    pub(crate) fn batch(&self, training: &TrainingRecipe, key: BatchKey, rows: usize) -> UtteranceBatch {
        let TrainingRecipe { split_words, swap_values, splice_values, hide_values, hide_words, .. } = *training;
        self.train.batch(key, rows, Variation { split_words, swap_values, splice_values, hide_values, hide_words })
    }

    pub(crate) fn save(&self, folder: &Path) -> Result<(), Failure> {
        self.pieces.save(&folder.join(TOKENIZER))?;
        let text = serde_json::to_string_pretty(&self.labels).map_err(|error| Failure::new(error.to_string()))?;
        write_atomic(&folder.join(LABELS), text.as_bytes())
    }

    /// Loss and scores on the validation split, with intent confusions.
    pub(crate) fn validate<B: Backend>(
        &self,
        model: &Transformer<B>,
        training: &TrainingRecipe,
        device: &B::Device,
    ) -> Result<ValidationOutput, Failure> {
        let heads = heads(model)?;
        let batches = self.valid.encoded.batches(BATCH_SIZE);
        let total = batches.iter().map(|(_, batch)| counts(batch)).fold(TargetCounts::default(), |a, b| a + b);
        let mut sum = Tensor::<B, 1>::zeros([1], device);
        let mut predicted = PredictedTags::new(&self.labels, &self.valid.encoded);
        for (indices, batch) in &batches {
            let (hidden, targets) = encode(batch, device, |tokens| model.forward(tokens));
            let (tags, intents) = counts(batch).shares(total);
            let weights = (intents * training.intent_weight, tags);
            sum = sum + heads.loss(hidden.clone(), targets, weights, HeadLossOptions::new());
            predicted.read(indices, heads.logits(hidden))?;
        }
        let report = self.report(&self.valid, predicted);
        let validation = Validation { scores: Some(report.scores), ..Validation::of_loss(read_scalars(vec![sum])?[0]) };
        Ok(ValidationOutput { validation, confusions: report.confusions })
    }

    /// The report of `model` on the test split.
    ///
    /// # Errors
    /// If the device fails.
    pub fn test<B: Backend>(
        &self,
        model: &Transformer<B>,
        device: &B::Device,
    ) -> Result<ClassificationReport, Failure> {
        let heads = heads(model)?;
        let mut predicted = PredictedTags::new(&self.labels, &self.test.encoded);
        for (indices, batch) in &self.test.encoded.batches(BATCH_SIZE) {
            let (hidden, _) = encode(batch, device, |tokens| model.forward(tokens));
            predicted.read(indices, heads.logits(hidden))?;
        }
        Ok(self.report(&self.test, predicted))
    }

    fn report(&self, HeldOut { utterances, .. }: &HeldOut, predicted: PredictedTags<'_>) -> ClassificationReport {
        ClassificationReport::new(utterances, &predicted.finish(utterances), &self.trained)
    }
}

/// The utterances of a recipe.
fn utterances(recipe: &Recipe) -> Result<Utterances, Failure> {
    match recipe.data.source.as_str() {
        "home" => Ok(Utterances::home()),
        EMBEDDED_NAMES => Ok(Utterances::names()),
        "" => Err(recipe.lacks_data("utterances")),
        folder => Ok(Utterances::read(Path::new(folder))?),
    }
}

/// Hidden states and targets of a batch, on the device.
fn encode<B: Backend>(
    batch: &UtteranceBatch,
    device: &B::Device,
    forward: impl FnOnce(Tokens<B>) -> Tensor<B, 3>,
) -> (Tensor<B, 3>, UtteranceTargets<B>) {
    let batch = batch.to_device::<B>(device);
    let tokens = Tokens::from(batch.ids).with_lengths(batch.lengths);
    let hidden = forward(match batch.types {
        Some(types) => tokens.with_types(types),
        None => tokens,
    });
    (hidden, UtteranceTargets { intents: batch.intents, tags: batch.tags })
}

/// The number of targets in a batch.
pub(crate) fn counts(batch: &UtteranceBatch) -> TargetCounts {
    TargetCounts { tokens: batch.tag_count(), intents: batch.intent_count(), ..TargetCounts::default() }
}

/// Weighted sum of the mean cross entropies of intents and tags: `[1]`, in nats.
///
/// # Panics
/// If the model has no heads for utterances.
pub fn loss<B: Backend>(
    model: &Transformer<B>,
    batch: &UtteranceBatch,
    weights: (f64, f64),
    options: HeadLossOptions,
    device: &B::Device,
) -> Tensor<B, 1> {
    loss_by(model, batch, weights, options, device, |tokens| model.forward(tokens))
}

/// [`loss`] with the hidden states of `forward`.
pub(crate) fn loss_by<B: Backend>(
    model: &Transformer<B>,
    batch: &UtteranceBatch,
    weights: (f64, f64),
    options: HeadLossOptions,
    device: &B::Device,
    forward: impl FnOnce(Tokens<B>) -> Tensor<B, 3>,
) -> Tensor<B, 1> {
    let (hidden, targets) = encode(batch, device, forward);
    match &model.heads {
        Some(heads) => heads.loss(hidden, targets, weights, options),
        None => panic!("the model has no heads for intents and tags"),
    }
}

/// Predictions for utterances, collected batch by batch.
struct PredictedTags<'a> {
    labels: &'a Labels,
    decoder: Decoder,
    encoded: &'a EncodedUtterances,
    found: Vec<Prediction>,
}

impl<'a> PredictedTags<'a> {
    fn new(labels: &'a Labels, encoded: &'a EncodedUtterances) -> Self {
        let nothing = Prediction { intent: String::new(), tags: Vec::new() };
        Self { labels, decoder: Decoder::of(labels), encoded, found: vec![nothing; encoded.len()] }
    }

    fn read<B: Backend>(&mut self, indices: &[usize], logits: (Tensor<B, 2>, Tensor<B, 3>)) -> Result<(), Failure> {
        let rows = Predictions::read(logits)?;
        for (row, index) in indices.iter().enumerate() {
            let words = rows.tags(row, self.encoded.word_columns(*index));
            let intents: Vec<f64> = rows.intents(row).iter().map(|odds| f64::from(*odds)).collect();
            let (intent, tags) = self.decoder.decode(&intents, &[words]);
            let tags = tags.into_iter().flatten().map(|tag| self.labels.tag(tag)).collect();
            self.found[*index] = Prediction { intent: self.labels.intents[intent].clone(), tags };
        }
        Ok(())
    }

    /// A tag for every word of `utterances`, truncated ones included.
    fn finish(mut self, utterances: &[Utterance]) -> Vec<Prediction> {
        for (found, utterance) in self.found.iter_mut().zip(utterances) {
            found.tags.resize(utterance.words.len(), "O".to_string());
        }
        self.found
    }
}
