//! Predictions for utterances, intent, probability and spans, and for labelled examples, a label.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use burn::tensor::{Int, Tensor, TensorData};
use fireclay_datasets::{Labels, PieceTokenizer, Word, spans, words};
use fireclay_kernels::Backend;
use fireclay_model::{ModelFolder, Tokens, Transformer};
use serde_json::{Value, json};

use crate::backend::{OnBackend, RunContext};
use crate::failure::Failure;
use crate::inference::classification::{Classifier, PredictedLabel};
use crate::inference::tagging::{Decoder, Predictions, heads, read_labels};
use crate::model_folder::warn_of_config;
use crate::precision::Precision;
use crate::recipe::ModelSizes;
use crate::run_folder::{LABELS, TOKENIZER};

/// The prediction for an utterance, or for a text of a classifier.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prediction {
    /// The label, of a classifier; `None` for an empty text.
    pub label: Option<String>,
    /// The intent; `None` for an empty text.
    pub intent: Option<String>,
    /// The probability of the intent, or of the label.
    pub probability: f64,
    /// The slots.
    pub spans: Vec<PredictedSpan>,
}

impl Prediction {
    /// As a JSON object, for `text`.
    pub fn json(&self, text: &str) -> Value {
        if let Some(label) = &self.label {
            return json!({ "text": text, "label": label, "probability": self.probability });
        }
        let spans = self.spans.iter().map(|PredictedSpan { slot, start, end, text }| {
            json!({ "slot": slot, "start": start, "end": end, "text": text })
        });
        let spans: Vec<Value> = spans.collect();
        json!({ "text": text, "intent": self.intent, "probability": self.probability, "spans": spans })
    }
}

/// A span that fills a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PredictedSpan {
    /// The slot.
    pub slot: String,
    /// First character.
    pub start: usize,
    /// Character after the last.
    pub end: usize,
    /// The text of the span.
    pub text: String,
}

/// A model that predicts intents and slots.
pub struct Predictor<B: Backend> {
    model: Transformer<B>,
    labels: Labels,
    decoder: Decoder,
    pieces: PieceTokenizer,
    device: B::Device,
}

/// Rows of a forward pass.
const BATCH_SIZE: usize = 64;

/// A part of a text that fits the model's context.
struct Window<'a> {
    /// Index of its text.
    text: usize,
    words: Vec<&'a Word>,
    /// First column of each word.
    columns: Vec<usize>,
    pieces: Vec<u32>,
}

impl<B: Backend> Predictor<B> {
    /// Opens a model folder.
    ///
    /// # Errors
    /// If a file is missing or damaged, the model was not trained on utterances, or the device
    /// lacks the precision.
    pub fn open(folder: &Path, precision: Precision, device: B::Device) -> Result<Self, Failure> {
        warn_of_config(folder)?;
        let model = precision.load::<B>(&ModelFolder::new(folder), &mut |_, _| {}, &device)?;
        let shown = folder.display();
        if model.heads.is_none() {
            return Err(Failure::new(format!(
                "{shown}: not trained on utterances or labels: train a model with `fireclay train --task intent-slot` or \
                 `--task classify`"
            )));
        }
        let labels = read_labels(&folder.join(LABELS))?;
        let pieces = PieceTokenizer::load(&folder.join(TOKENIZER))?;
        let sizes = ModelSizes::of_utterances(&labels, &pieces);
        sizes.fit(model.config()).map_err(|failure| failure.about(&shown.to_string()))?;
        let decoder = Decoder::of(&labels);
        Ok(Self { model, labels, decoder, pieces, device })
    }

    /// The model.
    pub fn model(&self) -> &Transformer<B> {
        &self.model
    }

    /// The prediction for each text. A text longer than the model's context is split into parts.
    ///
    /// # Errors
    /// If the device failed.
    pub fn predict(&self, inputs: &[&str]) -> Result<Vec<Prediction>, Failure> {
        let words: Vec<Vec<Word>> = inputs.iter().map(|text| words(text)).collect();
        let windows: Vec<Window<'_>> =
            words.iter().enumerate().flat_map(|(text, words)| self.windows(text, words)).collect();
        // Batch rows of similar length.
        let mut order: Vec<usize> = (0..windows.len()).collect();
        order.sort_by_key(|index| windows[*index].pieces.len());

        let mut intents = vec![vec![0.0; self.labels.intents.len()]; inputs.len()];
        let mut odds: Vec<Vec<Vec<f32>>> = vec![Vec::new(); windows.len()];
        for indices in order.chunks(BATCH_SIZE) {
            let batch: Vec<&Window<'_>> = indices.iter().map(|index| &windows[*index]).collect();
            let predictions = self.pass(&batch)?;
            for (row, (index, window)) in indices.iter().zip(batch).enumerate() {
                odds[*index] = predictions.tags(row, &window.columns).into_iter().map(<[f32]>::to_vec).collect();
                // A text's parts vote, weighted by length.
                let sums = intents[window.text].iter_mut().zip(predictions.intents(row));
                sums.for_each(|(sum, odds)| *sum += f64::from(odds.exp()) * window.words.len() as f64);
            }
        }

        let mut predictions = Vec::with_capacity(inputs.len());
        let (mut tags, mut read) = (Vec::with_capacity(windows.len()), 0);
        for (text, votes) in intents.iter().enumerate() {
            let parts = windows[read..].iter().take_while(|window| window.text == text).count();
            let (prediction, of_text) = self.decoded(votes, &odds[read..read + parts])?;
            predictions.push(prediction);
            tags.extend(of_text);
            read += parts;
        }
        for (window, tags) in windows.iter().zip(tags) {
            let tags: Vec<String> = tags.into_iter().map(|tag| self.labels.tag(tag)).collect();
            for span in spans(&tags) {
                let (first, last) = (window.words[span.words.start], window.words[span.words.end - 1]);
                let (start, end) = (first.start, last.end);
                predictions[window.text].spans.push(PredictedSpan { slot: span.slot, start, end, text: String::new() });
            }
        }
        for (prediction, text) in predictions.iter_mut().zip(inputs) {
            let characters: Vec<char> = text.chars().collect();
            for span in &mut prediction.spans {
                span.text = characters[span.start..span.end].iter().collect();
            }
        }
        Ok(predictions)
    }

    /// The intent of a text, and the tags of its parts, from the votes for the intents and the
    /// log-probabilities of the tags.
    fn decoded(&self, votes: &[f64], parts: &[Vec<Vec<f32>>]) -> Result<(Prediction, Vec<Vec<usize>>), Failure> {
        let all: f64 = votes.iter().sum();
        if !all.is_finite() {
            return Err(Failure::new("the model's output is not a number: its weights are damaged"));
        }
        if parts.is_empty() {
            return Ok((Prediction::default(), Vec::new()));
        }
        let intents: Vec<f64> = votes.iter().map(|votes| (votes / all).ln()).collect();
        let (intent, tags) = self.decoder.decode(&intents, parts);
        let (name, probability) = (self.labels.intents[intent].clone(), votes[intent] / all);
        Ok((Prediction { intent: Some(name), probability, ..Prediction::default() }, tags))
    }

    /// The words of a text, in parts that fit the context. Unknown punctuation is dropped.
    fn windows<'a>(&self, text: usize, words: &'a [Word]) -> Vec<Window<'a>> {
        let room = self.model.config().context_length;
        let (first, last) = (self.pieces.cls(), self.pieces.sep());
        let begun = || Window { text, words: Vec::new(), columns: Vec::new(), pieces: vec![first] };
        let mut windows = vec![begun()];
        for word in words {
            if self.labels.is_noise(&word.text) {
                continue;
            }
            let mut pieces = self.pieces.word(&word.text);
            pieces.truncate(room.saturating_sub(1 + usize::from(last.is_some())));
            let fits = |window: &Window<'_>| window.pieces.len() + pieces.len() + usize::from(last.is_some()) <= room;
            if windows.last().is_none_or(|window| !fits(window)) {
                windows.push(begun());
            }
            if let Some(window) = windows.last_mut() {
                window.columns.push(window.pieces.len());
                window.words.push(word);
                window.pieces.extend(pieces);
            }
        }
        windows.retain(|window| !window.words.is_empty());
        windows.iter_mut().for_each(|window| window.pieces.extend(last));
        windows
    }

    fn pass(&self, windows: &[&Window<'_>]) -> Result<Predictions, Failure> {
        let longest = windows.iter().map(|window| window.pieces.len()).max().unwrap_or(0);
        let padded = windows.iter().flat_map(|window| {
            let padding = std::iter::repeat_n(self.pieces.pad(), longest - window.pieces.len());
            window.pieces.iter().copied().chain(padding).map(|piece| piece as i32)
        });
        let ids = TensorData::new(padded.collect::<Vec<i32>>(), [windows.len(), longest]);
        let lengths: Vec<i32> = windows.iter().map(|window| window.pieces.len() as i32).collect();
        let lengths = TensorData::new(lengths, [windows.len()]);
        let ids = Tensor::<B, 2, Int>::from_data(ids, &self.device);
        let lengths = Tensor::<B, 1, Int>::from_data(lengths, &self.device);
        let mut tokens = Tokens::from(ids).with_lengths(lengths);
        if self.labels.type_count() > 0 {
            let mut types = vec![0; windows.len() * longest];
            for (row, window) in windows.iter().enumerate() {
                for (word, column) in window.words.iter().zip(&window.columns) {
                    types[row * longest + column] = self.labels.word_type(&word.text) as i32;
                }
            }
            let types = TensorData::new(types, [windows.len(), longest]);
            tokens = tokens.with_types(Tensor::from_data(types, &self.device));
        }
        let hidden = self.model.forward(tokens);
        Predictions::read(heads(&self.model)?.logits(hidden))
    }
}

/// A model that predicts from text: intents and slots, or labels.
pub enum AnyPredictor<B: Backend> {
    /// Intents and slots of utterances.
    Utterances(Box<Predictor<B>>),
    /// Labels of examples.
    Labels(Box<Classifier<B>>),
}

impl<B: Backend> AnyPredictor<B> {
    /// Opens a model folder.
    ///
    /// # Errors
    /// As [`Predictor::open`], and [`Classifier::open`].
    pub fn open(folder: &Path, precision: Precision, device: B::Device) -> Result<Self, Failure> {
        let (_, config) = ModelFolder::new(folder).config()?;
        Ok(match config.classifier {
            Some(_) => Self::Labels(Box::new(Classifier::open(folder, precision, device)?)),
            None => Self::Utterances(Box::new(Predictor::open(folder, precision, device)?)),
        })
    }

    /// The model.
    pub fn model(&self) -> &Transformer<B> {
        match self {
            Self::Utterances(predictor) => predictor.model(),
            Self::Labels(classifier) => classifier.model(),
        }
    }

    /// The prediction for each text.
    ///
    /// # Errors
    /// As [`Predictor::predict`], and [`Classifier::predict`].
    pub fn predict(&self, inputs: &[&str]) -> Result<Vec<Prediction>, Failure> {
        let of_label = |found: Option<PredictedLabel>| match found {
            Some(PredictedLabel { label, probability }) => {
                Prediction { label: Some(label), probability, ..Prediction::default() }
            }
            None => Prediction::default(),
        };
        match self {
            Self::Utterances(predictor) => predictor.predict(inputs),
            Self::Labels(classifier) => Ok(classifier.predict(inputs)?.into_iter().map(of_label).collect()),
        }
    }
}

/// The inputs to predict, a few at a time.
pub struct PredictionInput {
    /// Their name in errors.
    name: String,
    reader: BufReader<Box<dyn Read + Send>>,
    /// Lines read so far.
    lines: usize,
    one: Option<String>,
}

/// Maximum lines per batch.
const AT_ONCE: usize = 1024;

impl PredictionInput {
    /// A single text.
    pub fn one(text: String) -> Self {
        Self { one: Some(text), ..Self::lines("text", std::io::empty()) }
    }

    /// The lines of a source called `name`.
    pub fn lines(name: impl Into<String>, reader: impl Read + Send + 'static) -> Self {
        Self { name: name.into(), reader: BufReader::new(Box::new(reader)), lines: 0, one: None }
    }

    /// The inputs that are available, at least one: the sender of a line may wait for its answer.
    /// `None` at the end; an error comes after the inputs before it.
    fn next(&mut self) -> (Vec<String>, Option<Failure>) {
        if let Some(text) = self.one.take() {
            return (vec![text], None);
        }
        let mut inputs = Vec::new();
        while inputs.is_empty() || (inputs.len() < AT_ONCE && self.reader.buffer().contains(&b'\n')) {
            let mut line = Vec::new();
            let read = self.reader.read_until(b'\n', &mut line);
            let wrong =
                |reason: String| Some(Failure::new(format!("{}, line {}: {reason}", self.name, self.lines + 1)));
            match read {
                Ok(0) => return (inputs, None),
                Ok(_) => {}
                Err(error) => return (inputs, wrong(error.to_string())),
            }
            let Ok(line) = String::from_utf8(line) else { return (inputs, wrong("is not UTF-8 text".into())) };
            let line = line.strip_suffix('\n').unwrap_or(&line);
            let line = line.strip_suffix('\r').unwrap_or(line);
            // Some editors start a file with a byte order mark.
            let line = line.strip_prefix('\u{feff}').filter(|_| self.lines == 0).unwrap_or(line);
            inputs.push(line.to_string());
            self.lines += 1;
        }
        (inputs, None)
    }
}

/// Predictions with a model folder, for any backend.
pub struct PredictionRun<S> {
    /// The model folder.
    pub model: PathBuf,
    /// The inputs.
    pub inputs: PredictionInput,
    /// Data type of activations.
    pub precision: Precision,
    /// Receives each text and its prediction, in order.
    pub show: S,
}

impl<S: FnMut(&str, &Prediction)> OnBackend for PredictionRun<S> {
    type Output = ();

    fn run<B: Backend>(mut self, RunContext { device, .. }: RunContext<B>) -> Result<(), Failure> {
        let predictor = AnyPredictor::<B>::open(&self.model, self.precision, device)?;
        loop {
            let (inputs, failure) = self.inputs.next();
            let borrowed: Vec<&str> = inputs.iter().map(String::as_str).collect();
            for (text, prediction) in inputs.iter().zip(predictor.predict(&borrowed)?) {
                (self.show)(text, &prediction);
            }
            match failure {
                Some(failure) => return Err(failure),
                None if inputs.is_empty() => return Ok(()),
                None => {}
            }
        }
    }
}
