//! Intent and slots: what an utterance asks for, and which of its words say the particulars.
//!
//! An utterance is read as pieces of words behind a piece of its own, `[CLS]`. Its intent is read from there, the tag
//! of a word from its first piece.

use std::path::Path;

use burn::tensor::Tensor;
use fireclay_datasets::{
    BatchKey, EncodedUtterances, Labels, PieceTokenizer, Utterance, UtteranceBatch, Utterances, Variation,
};
use fireclay_kernels::{Backend, HeadLossOptions};
use fireclay_model::{Tokens, Transformer, TransformerConfig, UtteranceTargets};

use super::counts::TargetCounts;
use super::scores::{ClassificationReport, Prediction};
use super::validation::{Judged, Validation};
use crate::device_read::read_scalars;
use crate::failure::Failure;
use crate::inference::tagging::{Predictions, heads, read_labels};
use crate::recipe::{ModelSizes, Recipe, TrainingRecipe};
use crate::run_folder::{LABELS, TOKENIZER, write_atomic};

/// Utterances in three parts, and how they are read.
pub struct IntentSlot {
    labels: Labels,
    pieces: PieceTokenizer,
    train: EncodedUtterances,
    valid: HeldOut,
    test: HeldOut,
}

/// Utterances to be judged on.
struct HeldOut {
    utterances: Vec<Utterance>,
    encoded: EncodedUtterances,
}

/// Utterances of a batch outside of training.
const BATCH_SIZE: usize = 64;

impl IntentSlot {
    /// Utterances in rows of up to `seq_length` pieces, with the labels that the training part has.
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
        let train = encode(&utterances.train)?;
        let held_out = |part: Vec<Utterance>| {
            let encoded = encode(&part)?;
            Ok::<_, Failure>(HeldOut { utterances: part, encoded })
        };
        let (valid, test) = (held_out(utterances.valid)?, held_out(utterances.test)?);
        Ok(Self { labels, pieces, train, valid, test })
    }

    /// The utterances of `recipe`, with the labels of their training part.
    pub(crate) fn begin(recipe: &Recipe) -> Result<Self, Failure> {
        let utterances = utterances(recipe)?;
        let pieces = match (&recipe.init, recipe.data.tokenizer.as_str()) {
            (Some(model), _) if model.is_file() => {
                return Err(Failure::usage(format!("{}: a GGUF file has no encoder to begin from", model.display())));
            }
            (Some(model), _) => PieceTokenizer::load(&model.join(TOKENIZER))?,
            // The default is for texts.
            (None, "pieces" | "byte") => PieceTokenizer::train(&utterances.train, recipe.data.pieces)?,
            (None, file) => PieceTokenizer::load(Path::new(file))?,
        };
        let labels = Labels::of(&utterances.train);
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
            cut => format!(" (the ends of {cut} do not fit in {seq_length} pieces and are not learnt from)"),
        };
        let steps = training.steps;
        format!(
            "{known} pieces known; {intents} intents, {slots} slots in {count} utterances{cut}; {steps} steps of {rows} \
             utterances"
        )
    }

    /// The intents and slots known.
    pub fn labels(&self) -> &Labels {
        &self.labels
    }

    pub(crate) fn checksum(&self) -> Result<String, Failure> {
        let labels = serde_json::to_string(&self.labels).map_err(|error| Failure::new(error.to_string()))?;
        Ok(format!("{} {labels}", self.pieces.sha256()?))
    }

    /// Utterances to learn from.
    pub fn train_count(&self) -> usize {
        self.train.len()
    }

    /// Utterances of the test part; none where the data has no such part.
    pub fn test_count(&self) -> usize {
        self.test.utterances.len()
    }

    /// Utterances too long for a row, whose ends are not learnt from.
    pub fn cut_count(&self) -> usize {
        self.train.cut()
    }

    pub(crate) fn sizes(&self) -> ModelSizes {
        ModelSizes::of_utterances(&self.labels, &self.pieces)
    }

    pub(crate) fn batch(&self, training: &TrainingRecipe, key: BatchKey, rows: usize) -> UtteranceBatch {
        let TrainingRecipe { split_words, swap_values, hide_words, .. } = *training;
        self.train.batch(key, rows, Variation { split_words, swap_values, hide_words })
    }

    pub(crate) fn save(&self, folder: &Path) -> Result<(), Failure> {
        self.pieces.save(&folder.join(TOKENIZER))?;
        let text = serde_json::to_string_pretty(&self.labels).map_err(|error| Failure::new(error.to_string()))?;
        write_atomic(&folder.join(LABELS), text.as_bytes())
    }

    /// Loss and scores on the validation part, and which intents were taken for others.
    pub(crate) fn validate<B: Backend>(
        &self,
        model: &Transformer<B>,
        training: &TrainingRecipe,
        device: &B::Device,
    ) -> Result<Judged, Failure> {
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
        let report = ClassificationReport::new(&self.valid.utterances, &predicted.finish(&self.valid.utterances));
        let validation = Validation { loss: read_scalars(vec![sum])?[0], scores: Some(report.scores) };
        Ok(Judged { validation, confusions: report.confusions })
    }

    /// How `model` does on the test part.
    ///
    /// # Errors
    /// If the device failed.
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
        Ok(ClassificationReport::new(&self.test.utterances, &predicted.finish(&self.test.utterances)))
    }
}

/// The utterances that a recipe names.
fn utterances(recipe: &Recipe) -> Result<Utterances, Failure> {
    match recipe.data.source.as_str() {
        "home" => Ok(Utterances::home()),
        "" => Err(recipe.lacks_data("utterances")),
        folder => Ok(Utterances::read(Path::new(folder))?),
    }
}

/// Hidden states of a batch, and its targets, on the device.
fn encode<B: Backend>(
    batch: &UtteranceBatch,
    device: &B::Device,
    forward: impl FnOnce(Tokens<B>) -> Tensor<B, 3>,
) -> (Tensor<B, 3>, UtteranceTargets<B>) {
    let batch = batch.to_device::<B>(device);
    let hidden = forward(Tokens::from(batch.ids).with_lengths(batch.lengths));
    (hidden, UtteranceTargets { intents: batch.intents, tags: batch.tags })
}

/// The targets of a batch that count.
pub(crate) fn counts(batch: &UtteranceBatch) -> TargetCounts {
    TargetCounts { tokens: batch.tag_count(), intents: batch.intent_count() }
}

/// Mean cross entropies of intents and of tags, each times its weight and the options', added: `[1]` nats.
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

/// [`loss`] of the hidden states that `forward` gives.
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

/// What a model makes of utterances, gathered batch by batch.
struct PredictedTags<'a> {
    labels: &'a Labels,
    encoded: &'a EncodedUtterances,
    found: Vec<Prediction>,
}

impl<'a> PredictedTags<'a> {
    fn new(labels: &'a Labels, encoded: &'a EncodedUtterances) -> Self {
        let nothing = Prediction { intent: String::new(), tags: Vec::new() };
        Self { labels, encoded, found: vec![nothing; encoded.len()] }
    }

    fn read<B: Backend>(&mut self, indices: &[usize], logits: (Tensor<B, 2>, Tensor<B, 3>)) -> Result<(), Failure> {
        let rows = Predictions::read(logits)?;
        for (row, index) in indices.iter().enumerate() {
            let columns = self.encoded.word_columns(*index);
            let tags = rows.tags(row, columns, self.labels);
            let (intent, _) = rows.intent(row);
            self.found[*index] = Prediction { intent: self.labels.intents[intent].clone(), tags };
        }
        Ok(())
    }

    /// A tag for every word of `utterances`, those beyond a row's end included.
    fn finish(mut self, utterances: &[Utterance]) -> Vec<Prediction> {
        for (found, utterance) in self.found.iter_mut().zip(utterances) {
            found.tags.resize(utterance.words.len(), "O".to_string());
        }
        self.found
    }
}
