//! Utterances understood by a trained model: intent, probability and spans.

use std::path::{Path, PathBuf};

use burn::tensor::{Int, Tensor, TensorData};
use fireclay_datasets::{Labels, PieceTokenizer, Word, spans, words};
use fireclay_kernels::Backend;
use fireclay_model::{ModelFolder, Tokens, Transformer};

use crate::Failure;
use crate::backend::OnBackend;
use crate::tasks::intent_slot::{Predictions, heads};
use crate::training::Precision;
use crate::training::checkpoint::{LABELS, TOKENIZER};
use crate::training::recipe::read_labels;

/// An utterance as it was understood.
#[derive(Clone, Debug, PartialEq)]
pub struct Understood {
    /// The intent; `None` where there are no words.
    pub intent: Option<String>,
    /// The intent's probability.
    pub probability: f64,
    /// What the utterance says in particular.
    pub spans: Vec<UnderstoodSpan>,
}

/// A part of an utterance that fills a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnderstoodSpan {
    /// The slot.
    pub slot: String,
    /// First character.
    pub start: usize,
    /// Character behind the last.
    pub end: usize,
    /// What stands there.
    pub text: String,
}

/// A model that understands utterances.
pub struct Listener<B: Backend> {
    model: Transformer<B>,
    labels: Labels,
    pieces: PieceTokenizer,
    device: B::Device,
}

/// Rows of a forward pass.
const BATCH_SIZE: usize = 64;

/// Part of a text that fits the model's context.
struct Window<'a> {
    /// Which text it belongs to.
    text: usize,
    words: Vec<&'a Word>,
    /// Where each word begins.
    columns: Vec<usize>,
    pieces: Vec<u32>,
}

impl<B: Backend> Listener<B> {
    /// Opens a model folder.
    ///
    /// # Errors
    /// If a file is missing or damaged, the model was not trained on utterances, or the device lacks the precision.
    pub fn open(folder: &Path, precision: Precision, device: B::Device) -> Result<Self, Failure> {
        let activations = precision.activations::<B>(&device)?;
        let model = ModelFolder::new(folder).load::<B>(&device)?.with_activations(activations);
        let shown = folder.display();
        if model.heads.is_none() {
            return Err(Failure::new(format!(
                "{shown}: not trained on utterances; train such a model with `fireclay train --task intent-slot`"
            )));
        }
        let labels = read_labels(&folder.join(LABELS))?;
        let config = model.config();
        if config.intents != labels.intents.len() || config.tags != labels.tag_count() {
            return Err(Failure::new(format!(
                "{shown}: {LABELS} has {} intents and {} tags, but the model {} and {}",
                labels.intents.len(),
                labels.tag_count(),
                config.intents,
                config.tags
            )));
        }
        let pieces = PieceTokenizer::load(&folder.join(TOKENIZER))?;
        if pieces.vocab_size() > config.vocab_size {
            let (known, pieces) = (config.vocab_size, pieces.vocab_size());
            return Err(Failure::new(format!("{shown}: {TOKENIZER} has {pieces} pieces, but the model knows {known}")));
        }
        Ok(Self { model, labels, pieces, device })
    }

    /// What each text is understood as. A text longer than the model's context is heard in parts.
    ///
    /// # Errors
    /// If the device failed.
    pub fn understand(&self, texts: &[&str]) -> Result<Vec<Understood>, Failure> {
        let words: Vec<Vec<Word>> = texts.iter().map(|text| words(text)).collect();
        let windows: Vec<Window<'_>> =
            words.iter().enumerate().flat_map(|(text, words)| self.windows(text, words)).collect();
        // Rows of similar length share a pass.
        let mut order: Vec<usize> = (0..windows.len()).collect();
        order.sort_by_key(|index| windows[*index].pieces.len());

        let mut intents = vec![vec![0.0; self.labels.intents.len()]; texts.len()];
        let mut tags: Vec<Vec<String>> = vec![Vec::new(); windows.len()];
        for indices in order.chunks(BATCH_SIZE) {
            let batch: Vec<&Window<'_>> = indices.iter().map(|index| &windows[*index]).collect();
            let predictions = self.pass(&batch)?;
            for (row, (index, window)) in indices.iter().zip(batch).enumerate() {
                tags[*index] = predictions.tags(row, &window.columns, &self.labels);
                // A text's parts vote with their length.
                let (_, odds) = predictions.intent(row);
                let sums = intents[window.text].iter_mut().zip(odds);
                sums.for_each(|(sum, odds)| *sum += f64::from(odds.exp()) * window.words.len() as f64);
            }
        }

        let mut understood: Vec<Understood> =
            intents.iter().zip(&words).map(|(sums, words)| self.intent(sums, words.len())).collect();
        for (window, tags) in windows.iter().zip(tags) {
            let text = texts[window.text];
            let found = spans(&tags).into_iter().map(|span| {
                let (start, end) = (window.words[span.words.start].start, window.words[span.words.end - 1].end);
                let text = text.chars().skip(start).take(end - start).collect();
                UnderstoodSpan { slot: span.slot, start, end, text }
            });
            understood[window.text].spans.extend(found);
        }
        Ok(understood)
    }

    fn intent(&self, sums: &[f64], words: usize) -> Understood {
        let best =
            sums.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).filter(|_| sums.iter().any(|sum| *sum > 0.0));
        let (intent, probability) = match best {
            Some((index, sum)) => (Some(self.labels.intents[index].clone()), sum / sums.iter().sum::<f64>()),
            None => (None, 0.0),
        };
        debug_assert!(intent.is_some() || words == 0 || sums.is_empty());
        Understood { intent, probability, spans: Vec::new() }
    }

    /// The words of a text in parts that fit the context. Punctuation that the model never met is passed over.
    fn windows<'a>(&self, text: usize, words: &'a [Word]) -> Vec<Window<'a>> {
        let room = self.model.config().context_length;
        let (first, last) = (self.pieces.cls(), self.pieces.sep());
        let begun = || Window { text, words: Vec::new(), columns: Vec::new(), pieces: vec![first] };
        let mut windows = vec![begun()];
        for word in words {
            let unknown_mark = !word.text.chars().any(char::is_alphanumeric) && !self.pieces.is_known(&word.text);
            if unknown_mark {
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
        let hidden = self.model.forward(Tokens::from(ids).with_lengths(lengths), None);
        Predictions::read(heads(&self.model)?.logits(hidden))
    }
}

/// Texts for a model folder, as work for any backend.
pub struct PredictionRun<S> {
    /// The model folder.
    pub model: PathBuf,
    /// The texts.
    pub texts: Box<dyn Iterator<Item = Result<String, Failure>>>,
    /// How many of them are read before they are understood together.
    pub at_once: usize,
    /// Dtype of activations.
    pub precision: Precision,
    /// Told of each text, in their order.
    pub show: S,
}

impl<S: FnMut(&str, &Understood)> OnBackend for PredictionRun<S> {
    type Output = ();

    fn run<B: Backend>(mut self, device: B::Device) -> Result<(), Failure> {
        let listener = Listener::<B>::open(&self.model, self.precision, device)?;
        loop {
            let texts = self.texts.by_ref().take(self.at_once).collect::<Result<Vec<String>, Failure>>()?;
            if texts.is_empty() {
                return Ok(());
            }
            let borrowed: Vec<&str> = texts.iter().map(String::as_str).collect();
            for (text, understood) in texts.iter().zip(listener.understand(&borrowed)?) {
                (self.show)(text, &understood);
            }
        }
    }
}
