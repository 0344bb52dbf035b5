//! Utterances as word pieces, and batches of them.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

use crate::batch::IGNORED_TARGET;
use crate::by_length;
use crate::corpus::BatchKey;
use crate::error::DataError;
use crate::labels::{Labels, UNKNOWN_TYPE};
use crate::pieces::PieceTokenizer;
use crate::random::Generator;
use crate::utterance::Utterance;

/// Rows of word pieces with an intent and tags as targets, on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UtteranceBatch {
    ids: Vec<i32>,
    /// Empty if words have no types.
    types: Vec<i32>,
    targets: Vec<i32>,
    lengths: Vec<i32>,
    seq_length: usize,
}

/// Pieces, their types and their targets.
#[derive(Default)]
struct Spelt {
    ids: Vec<i32>,
    types: Vec<i32>,
    targets: Vec<i32>,
}

impl UtteranceBatch {
    /// Rows padded to the longest with `padding`; with types if words have some.
    fn new(rows: &[Spelt], typed: bool, padding: i32) -> Self {
        let seq_length = rows.iter().map(|row| row.ids.len()).max().unwrap_or(1).max(1);
        let (ids, types, targets, lengths) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut batch = Self { ids, types, targets, lengths, seq_length };
        for Spelt { ids, types, targets } in rows {
            batch.lengths.push(ids.len() as i32);
            let cells = batch.lengths.len() * seq_length;
            batch.ids.extend(ids);
            batch.targets.extend(targets);
            batch.ids.resize(cells, padding);
            batch.targets.resize(cells, IGNORED_TARGET);
            if typed {
                batch.types.extend(types);
                batch.types.resize(cells, 0);
            }
        }
        batch
    }

    /// Pieces, in row-major order.
    pub fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// The type of each piece; empty if words have no types.
    pub fn types(&self) -> &[i32] {
        &self.types
    }

    /// The intent in the first column of a row, the tag of each word at its first piece, and
    /// [`IGNORED_TARGET`].
    pub fn targets(&self) -> &[i32] {
        &self.targets
    }

    /// Pieces of each row, without padding.
    pub fn lengths(&self) -> &[i32] {
        &self.lengths
    }

    /// Number of rows.
    pub fn batch_size(&self) -> usize {
        self.lengths.len()
    }

    /// Columns, padding included.
    pub fn seq_length(&self) -> usize {
        self.seq_length
    }

    /// Number of tag targets.
    pub fn tag_count(&self) -> usize {
        self.count(|column| column > 0)
    }

    /// Number of intent targets.
    pub fn intent_count(&self) -> usize {
        self.count(|column| column == 0)
    }

    fn count(&self, counts: impl Fn(usize) -> bool) -> usize {
        let columns = self.targets.iter().enumerate();
        columns.filter(|(at, target)| counts(at % self.seq_length) && **target != IGNORED_TARGET).count()
    }

    /// The same rows in `parts` batches of equal size, or fewer if there are fewer rows.
    pub fn split(self, parts: usize) -> Vec<Self> {
        let (all, rows) = (self.batch_size(), self.batch_size().div_ceil(parts.max(1)).max(1));
        (0..all).step_by(rows).map(|begin| self.rows(begin..all.min(begin + rows))).collect()
    }

    /// Some of its rows, as long as they are here.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn rows(&self, rows: Range<usize>) -> Self {
        let cells = rows.start * self.seq_length..rows.end * self.seq_length;
        Self {
            ids: self.ids[cells.clone()].to_vec(),
            types: self.types.get(cells.clone()).unwrap_or_default().to_vec(),
            targets: self.targets[cells].to_vec(),
            lengths: self.lengths[rows].to_vec(),
            seq_length: self.seq_length,
        }
    }

    /// Uploads the batch.
    pub fn to_device<B: Backend>(&self, device: &B::Device) -> DeviceBatch<B> {
        let (batch_size, seq_length) = (self.batch_size(), self.seq_length);
        let mut tags = self.targets.clone();
        let mut intents = vec![IGNORED_TARGET; tags.len()];
        for first in (0..tags.len()).step_by(seq_length) {
            std::mem::swap(&mut tags[first], &mut intents[first]);
        }
        // As one row, then reshaped: devices may pad the rows of a matrix.
        let row = |values: &[i32]| Tensor::<B, 1, Int>::from_data(values, device);
        let cells = |values: &[i32]| row(values).reshape([batch_size, seq_length]);
        DeviceBatch {
            ids: cells(&self.ids),
            types: (!self.types.is_empty()).then(|| cells(&self.types)),
            tags: cells(&tags),
            intents: cells(&intents),
            lengths: row(&self.lengths),
        }
    }
}

/// An [`UtteranceBatch`] on a device.
#[derive(Clone, Debug)]
pub struct DeviceBatch<B: Backend> {
    /// Pieces, `[batch_size, seq_length]`.
    pub ids: Tensor<B, 2, Int>,
    /// Types of pieces, `[batch_size, seq_length]`, if words have types.
    pub types: Option<Tensor<B, 2, Int>>,
    /// Tags at the first piece of each word, [`IGNORED_TARGET`] elsewhere, `[batch_size,
    /// seq_length]`.
    pub tags: Tensor<B, 2, Int>,
    /// Pieces of each row without padding, `[batch_size]`.
    pub lengths: Tensor<B, 1, Int>,
    /// Intents in the first column, [`IGNORED_TARGET`] elsewhere, `[batch_size, seq_length]`.
    pub intents: Tensor<B, 2, Int>,
}

/// Data augmentation in training. All shares are probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Variation {
    /// Of spelling a word letter by letter, so that letters get meaning in unseen words.
    pub split_words: f64,
    /// Of replacing a slot's value by one of the same slot in another utterance.
    pub swap_values: f64,
    /// Of making such a value, of an open slot, from the beginning of one value and the end of
    /// another, so that its borders are learnt from what is around it.
    pub splice_values: f64,
    /// Of masking words of an open slot's value, each with a probability of a half.
    pub hide_values: f64,
    /// Of masking a word with `[UNK]`, so that the model learns to use its context.
    pub hide_words: f64,
}

/// Added to the seed of augmentation, so that it differs from that of the order.
const WITHIN_ROWS: u64 = 1 << 63;

/// The spellings of a distinct word.
#[derive(Debug)]
struct Spelling {
    usual: Vec<u32>,
    letters: Vec<u32>,
    kind: usize,
}

/// An utterance as spellings.
#[derive(Debug)]
struct Row {
    intent: i32,
    /// Index of each word's spellings, and its tag.
    words: Vec<(usize, i32)>,
    /// Start of each word in the usual spelling.
    columns: Vec<usize>,
    /// Pieces in the usual spelling, special ones included.
    length: usize,
}

/// The words of a value: the index of each one's spellings, and its tag.
type Value = Vec<(usize, i32)>;

/// The values of a slot.
#[derive(Debug, Default)]
struct Values {
    /// With repetitions.
    all: Vec<Value>,
    /// Words of the longest.
    longest: usize,
    is_open: bool,
}

/// From which probability on that the next value of a slot is a new one the slot is open. Reports
/// call a slot open from the same share of unseen values on.
const OPEN_FROM: f64 = 0.25;

impl Values {
    fn of(all: Vec<Value>) -> Self {
        let mut counts = HashMap::<&[(usize, i32)], usize>::new();
        all.iter().for_each(|value| *counts.entry(value).or_default() += 1);
        // The share of values that occur once estimates the probability of a new one (Good, 1953).
        let once = counts.values().filter(|count| **count == 1).count();
        let is_open = counts.len() > 1 && once as f64 >= OPEN_FROM * all.len() as f64;
        let longest = all.iter().map(Vec::len).max().unwrap_or(0);
        Self { all, longest, is_open }
    }

    fn draw(&self, rng: &mut Generator) -> &Value {
        &self.all[rng.below(self.all.len())]
    }

    /// A value, as it is or spliced.
    fn varied(&self, rng: &mut Generator, splice_values: f64) -> Cow<'_, [(usize, i32)]> {
        let first = self.draw(rng);
        if splice_values == 0.0 || !self.is_open || !rng.chance(splice_values) {
            return Cow::Borrowed(first);
        }
        let second = self.draw(rng);
        let (head, tail) = (1 + rng.below(first.len()), 1 + rng.below(second.len()));
        let inside = first[0].1 + 1;
        let mut spliced = first[..head].to_vec();
        spliced.extend(second[second.len() - tail..].iter().map(|(place, _)| (*place, inside)));
        spliced.truncate(self.longest);
        Cow::Owned(spliced)
    }
}

/// The order of an epoch, and its key.
#[derive(Debug)]
struct Epoch {
    drawn_for: (u64, u64, usize),
    batches: Vec<Vec<usize>>,
}

/// Encoded utterances.
#[derive(Debug)]
pub struct EncodedUtterances {
    rows: Vec<Row>,
    spellings: Vec<Spelling>,
    /// The values of each slot, by the tag that begins them.
    values: HashMap<i32, Values>,
    longest: usize,
    cut: usize,
    unknown: u32,
    cls: u32,
    sep: Option<u32>,
    pad: u32,
    typed: bool,
    epoch: Mutex<Option<Epoch>>,
}

impl EncodedUtterances {
    /// Encodes utterances in rows of at most `longest` pieces, special ones included. A longer
    /// utterance is truncated after the last word that fits. Intents and tags missing in `labels`
    /// are ignored.
    ///
    /// # Errors
    /// If `longest` leaves no room for a word.
    pub fn new(
        utterances: &[Utterance],
        labels: &Labels,
        pieces: &PieceTokenizer,
        longest: usize,
    ) -> Result<Self, DataError> {
        let special = 1 + usize::from(pieces.sep().is_some());
        if longest <= special {
            let reason = format!("{longest} pieces leave no room for a word next to the {special} special ones");
            return Err(DataError::Tokenizer(reason));
        }
        let mut encoded = Self {
            rows: Vec::with_capacity(utterances.len()),
            spellings: Vec::new(),
            values: HashMap::new(),
            longest,
            cut: 0,
            unknown: pieces.unknown(),
            cls: pieces.cls(),
            sep: pieces.sep(),
            pad: pieces.pad(),
            typed: labels.type_count() > 0,
            epoch: Mutex::new(None),
        };
        let mut known = HashMap::<&str, usize>::new();
        let mut values = HashMap::<i32, Vec<Value>>::new();
        let target = |id: Option<usize>| id.map_or(IGNORED_TARGET, |id| id as i32);
        for utterance in utterances {
            let intent = target(labels.intent_id(&utterance.intent));
            let mut row = Row { intent, words: Vec::new(), columns: Vec::new(), length: special };
            for (at, word) in utterance.words.iter().enumerate() {
                let place = *known.entry(word).or_insert_with(|| {
                    let (usual, letters, kind) = (pieces.word(word), pieces.letters(word), labels.word_type(word));
                    encoded.spellings.push(Spelling { usual, letters, kind });
                    encoded.spellings.len() - 1
                });
                let length = encoded.spellings[place].usual.len();
                if row.length + length > longest {
                    encoded.cut += 1;
                    break;
                }
                let tag = utterance.tags.get(at).and_then(|tag| labels.tag_id(tag));
                row.words.push((place, target(tag)));
                row.columns.push(row.length - (special - 1));
                row.length += length;
            }
            for span in value_spans(&row.words) {
                let value = row.words[span].to_vec();
                values.entry(value[0].1).or_default().push(value);
            }
            encoded.rows.push(row);
        }
        encoded.values = values.into_iter().map(|(tag, values)| (tag, Values::of(values))).collect();
        Ok(encoded)
    }

    /// Number of utterances.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Number of truncated utterances.
    pub fn cut(&self) -> usize {
        self.cut
    }

    /// The open slots, by the ids of the tags that begin them: the next value of such a slot is a new
    /// one with a probability of at least a quarter, by the values that occur once.
    pub fn open_slots(&self) -> Vec<usize> {
        let open = self.values.iter().filter(|(_, values)| values.is_open);
        let mut tags: Vec<usize> = open.map(|(tag, _)| *tag as usize).collect();
        tags.sort_unstable();
        tags
    }

    /// The columns at which the words of an utterance start, as in [`Self::batches`].
    pub fn word_columns(&self, index: usize) -> &[usize] {
        &self.rows[index].columns
    }

    /// Training steps per epoch.
    pub fn steps_per_epoch(&self, batch_size: usize) -> u64 {
        self.rows.len().div_ceil(batch_size.max(1)).max(1) as u64
    }

    /// The training batch of a step, of `batch_size` rows: a pure function of `key`.
    ///
    /// In an epoch every utterance occurs once, batched by length; the last batch may be smaller.
    /// Augmentation is limited by the length of a row.
    pub fn batch(&self, key: BatchKey, batch_size: usize, variation: Variation) -> UtteranceBatch {
        let BatchKey { seed, step } = key;
        let steps = self.steps_per_epoch(batch_size);
        let drawn_for = (seed, step / steps, batch_size);
        let mut kept = self.epoch.lock().unwrap_or_else(PoisonError::into_inner);
        let epoch = match kept.take() {
            Some(epoch) if epoch.drawn_for == drawn_for => epoch,
            _ => Epoch { drawn_for, batches: self.order(seed, step / steps, batch_size.max(1)) },
        };
        let epoch = kept.insert(epoch);
        let rows = epoch.batches.get((step % steps) as usize).into_iter().flatten().enumerate();
        let rows: Vec<_> = rows
            .map(|(row, index)| {
                let mut rng = Generator::new(seed.wrapping_add(WITHIN_ROWS), step, row as u64);
                self.varied(&self.rows[*index], &mut rng, variation)
            })
            .collect();
        UtteranceBatch::new(&rows, self.typed, self.pad as i32)
    }

    /// All utterances sorted by length in their usual spelling: their indices and the batch.
    pub fn batches(&self, batch_size: usize) -> Vec<(Vec<usize>, UtteranceBatch)> {
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        order.sort_by_key(|index| self.rows[*index].length);
        let batch = |indices: &[usize]| {
            let rows: Vec<_> = indices.iter().map(|index| self.usual(&self.rows[*index])).collect();
            (indices.to_vec(), UtteranceBatch::new(&rows, self.typed, self.pad as i32))
        };
        order.chunks(batch_size.max(1)).map(batch).collect()
    }

    /// The batches of an epoch.
    fn order(&self, seed: u64, epoch: u64, batch_size: usize) -> Vec<Vec<usize>> {
        let lengths: Vec<usize> = self.rows.iter().map(|row| row.length).collect();
        by_length::epoch(&lengths, seed, epoch, batch_size)
    }

    /// An unchanged utterance.
    fn usual(&self, row: &Row) -> Spelt {
        self.spelt(row.intent, row.words.iter().map(|(place, tag)| self.usual_word(*place, *tag)))
    }

    fn usual_word(&self, place: usize, tag: i32) -> Written<'_> {
        let Spelling { usual, kind, .. } = &self.spellings[place];
        Written { pieces: usual, tag, kind: *kind }
    }

    /// An augmented utterance.
    fn varied(&self, row: &Row, rng: &mut Generator, variation: Variation) -> Spelt {
        let usual = |words: &[(usize, i32)]| -> usize {
            words.iter().map(|(place, _)| self.spellings[*place].usual.len()).sum()
        };
        let mut room = self.longest - row.length;
        // The words, and whether they are masked.
        let mut words = Vec::with_capacity(row.words.len());
        let seen = |(place, tag): &(usize, i32)| (*place, *tag, false);
        let mut said = 0;
        for span in value_spans(&row.words) {
            words.extend(row.words[said..span.start].iter().map(seen));
            said = span.end;
            let value = &row.words[span];
            let known = self.values.get(&value[0].1);
            let others = known.filter(|_| rng.chance(variation.swap_values));
            let other = others.map(|others| others.varied(rng, variation.splice_values));
            let chosen = other.filter(|other| usual(other) <= usual(value) + room).unwrap_or(Cow::Borrowed(value));
            room = room + usual(value) - usual(&chosen);
            let is_open = variation.hide_values > 0.0 && known.is_some_and(|known| known.is_open);
            let hides = is_open && rng.chance(variation.hide_values);
            words.extend(chosen.iter().map(|(place, tag)| (*place, *tag, hides && rng.chance(0.5))));
        }
        words.extend(row.words[said..].iter().map(seen));

        // A word whose pieces are not its usual ones is as unknown as a new word.
        let kind = if self.typed { UNKNOWN_TYPE } else { 0 };
        let unknown = [self.unknown];
        let written: Vec<Written<'_>> = words
            .iter()
            .map(|(place, tag, hidden)| {
                let Spelling { usual, letters, .. } = &self.spellings[*place];
                let more = letters.len().saturating_sub(usual.len());
                if !hidden && rng.chance(variation.split_words) && more <= room {
                    room -= more;
                    Written { pieces: letters, tag: *tag, kind }
                } else if *hidden || rng.chance(variation.hide_words) {
                    Written { pieces: &unknown, tag: *tag, kind }
                } else {
                    self.usual_word(*place, *tag)
                }
            })
            .collect();
        self.spelt(row.intent, written.into_iter())
    }

    /// Pieces, types and targets of tagged words.
    fn spelt<'a>(&self, intent: i32, words: impl Iterator<Item = Written<'a>>) -> Spelt {
        let mut spelt = Spelt { ids: vec![self.cls as i32], types: vec![0], targets: vec![intent] };
        for Written { pieces, tag, kind } in words {
            spelt.targets.push(tag);
            spelt.types.push(kind as i32);
            spelt.ids.extend(pieces.iter().map(|piece| *piece as i32));
            spelt.targets.resize(spelt.ids.len(), IGNORED_TARGET);
            spelt.types.resize(spelt.ids.len(), 0);
        }
        spelt.ids.extend(self.sep.map(|sep| sep as i32));
        spelt.targets.resize(spelt.ids.len(), IGNORED_TARGET);
        spelt.types.resize(spelt.ids.len(), 0);
        spelt
    }
}

/// A word as it is spelt in a batch.
struct Written<'a> {
    pieces: &'a [u32],
    tag: i32,
    kind: usize,
}

/// The positions of slot values among words with tag ids.
fn value_spans(words: &[(usize, i32)]) -> Vec<Range<usize>> {
    let mut spans: Vec<Range<usize>> = Vec::new();
    for (at, (_, tag)) in words.iter().enumerate() {
        match spans.last_mut() {
            Some(span) if *tag > 0 && tag % 2 == 0 && span.end == at && words[span.start].1 == tag - 1 => {
                span.end = at + 1;
            }
            _ if *tag > 0 && tag % 2 == 1 => spans.push(at..at + 1),
            _ => {}
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::TensorData;
    use burn_ndarray::NdArray;
    use std::collections::BTreeSet;

    fn utterance(text: &str, tags: &str, intent: &str) -> Utterance {
        let owned = |text: &str| text.split_whitespace().map(str::to_owned).collect();
        Utterance { words: owned(text), tags: owned(tags), intent: intent.to_owned() }
    }

    fn utterances() -> Vec<Utterance> {
        vec![
            utterance("play play song", "O O B-song", "music"),
            utterance("play", "O", "music"),
            utterance("song on on", "B-song I-song O", "music"),
            utterance("on", "O", "light"),
        ]
    }

    fn pieces() -> PieceTokenizer {
        PieceTokenizer::train(&utterances(), 100).expect("room for letters")
    }

    fn encoded(longest: usize) -> EncodedUtterances {
        EncodedUtterances::new(&utterances(), &Labels::of(&utterances()), &pieces(), longest).expect("room for words")
    }

    const NO: i32 = IGNORED_TARGET;
    const AS_IT_IS: Variation =
        Variation { split_words: 0.0, swap_values: 0.0, splice_values: 0.0, hide_values: 0.0, hide_words: 0.0 };

    fn varied(share: f64) -> Variation {
        Variation {
            split_words: share,
            swap_values: share,
            splice_values: share,
            hide_values: share,
            hide_words: share,
        }
    }

    #[test]
    fn a_value_is_exchanged_for_another_of_its_slot_only() {
        let said = [
            utterance("go to new york by rail", "O O B-city I-city O B-way", "go"),
            utterance("go to rome", "O O B-city", "go"),
            utterance("bus", "B-way", "go"),
        ];
        let labels = Labels::of(&said);
        let pieces = PieceTokenizer::train(&[said.clone(), said.clone()].concat(), 200).expect("room for letters");
        let all = EncodedUtterances::new(&said, &labels, &pieces, 16).expect("room for words");
        let spelt = |text: &str| -> Vec<i32> {
            text.split(' ').flat_map(|word| pieces.word(word)).map(|piece| piece as i32).collect()
        };
        let mut seen = BTreeSet::new();
        for step in 0..100 {
            let batch = all.batch(BatchKey::new(2, step), 1, Variation { swap_values: 0.9, ..AS_IT_IS });
            let length = batch.lengths()[0] as usize;
            let tags: Vec<i32> = batch.targets()[1..length - 1].iter().copied().filter(|tag| *tag != NO).collect();
            seen.insert((batch.ids()[1..length - 1].to_vec(), tags));
        }
        let wanted = [
            ("go to new york by rail", vec![0, 0, 1, 2, 0, 3]),
            ("go to new york by bus", vec![0, 0, 1, 2, 0, 3]),
            ("go to rome by rail", vec![0, 0, 1, 0, 3]),
            ("go to rome by bus", vec![0, 0, 1, 0, 3]),
            ("go to rome", vec![0, 0, 1]),
            ("go to new york", vec![0, 0, 1, 2]),
            ("bus", vec![3]),
            ("rail", vec![3]),
        ];
        let wanted: BTreeSet<_> = wanted.into_iter().map(|(text, tags)| (spelt(text), tags)).collect();
        assert_eq!(seen, wanted);
    }

    #[test]
    fn rows_hold_pieces_targets_and_padding() {
        let all = encoded(16);
        let (indices, batch) = all.batches(4).remove(0);
        assert_eq!(indices, [1, 3, 0, 2]);
        assert_eq!((batch.batch_size(), batch.seq_length()), (4, 5));
        assert_eq!(batch.lengths(), [3, 3, 5, 5]);
        let id = |word: &str| pieces().word(word)[0] as i32;
        let (play, song, on) = (id("play"), id("song"), id("on"));
        assert_eq!(batch.ids()[..10], [2, play, 3, 0, 0, 2, on, 3, 0, 0]);
        assert_eq!(batch.ids()[10..], [2, play, play, song, 3, 2, song, on, on, 3]);
        // Intents: light, music. Tags: O, B-song, I-song.
        assert_eq!(batch.targets()[..10], [1, 0, NO, NO, NO, 0, 0, NO, NO, NO]);
        assert_eq!(batch.targets()[10..], [1, 0, 0, 1, NO, 1, 1, 2, 0, NO]);
        assert_eq!((batch.tag_count(), batch.intent_count()), (8, 4));
        assert_eq!(all.word_columns(0), [1, 2, 3]);
    }

    #[test]
    fn the_tag_of_a_word_is_at_its_first_piece() {
        let samples = [utterance("song gnosy on", "B-song I-song O", "music")];
        let all = EncodedUtterances::new(&samples, &Labels::of(&utterances()), &pieces(), 16).expect("room for words");
        let batch = all.batches(1).remove(0).1;
        let columns = all.word_columns(0).to_vec();
        assert!(batch.seq_length() > 5);
        let counted = (1..batch.seq_length()).filter(|column| batch.targets()[*column] != NO);
        assert_eq!(counted.collect::<Vec<_>>(), columns);
        assert_eq!(columns.iter().map(|column| batch.targets()[*column]).collect::<Vec<_>>(), [1, 2, 0]);
    }

    #[test]
    fn the_type_of_a_word_is_at_its_first_piece() {
        let labels = Labels::of(&utterances()).with_word_types(&utterances());
        let samples = [utterance("song gnosy on", "B-song I-song O", "music"), utterance("on", "O", "light")];
        let all = EncodedUtterances::new(&samples, &labels, &pieces(), 16).expect("room for words");
        let batch = all.batches(2).remove(0).1;
        assert_eq!(batch.batch_size() * batch.seq_length(), batch.types().len());
        // Known: on, play, song.
        let columns = [(0, vec![1], vec![2]), (1, all.word_columns(0).to_vec(), vec![4, 1, 2])];
        for (row, columns, types) in columns {
            let mut wanted = vec![0; batch.seq_length()];
            columns.iter().zip(types).for_each(|(column, kind)| wanted[*column] = kind);
            assert_eq!(batch.types()[row * batch.seq_length()..][..batch.seq_length()], wanted);
            assert_eq!(batch.rows(row..row + 1).types(), wanted);
        }
        assert_eq!(batch.clone().split(2)[1].types(), batch.rows(1..2).types());
        assert!(encoded(16).batches(4)[0].1.types().is_empty());
        let there = batch.to_device::<NdArray>(&Default::default()).types.expect("types").into_data();
        assert_eq!(there.iter::<i64>().map(|value| value as i32).collect::<Vec<_>>(), batch.types());
    }

    #[test]
    fn hidden_words_and_those_in_letters_are_unknown() {
        let labels = Labels::of(&utterances()).with_word_types(&utterances());
        let all = EncodedUtterances::new(&utterances(), &labels, &pieces(), 64).expect("room for words");
        for variation in [Variation { split_words: 0.999, ..AS_IT_IS }, Variation { hide_words: 0.999, ..AS_IT_IS }] {
            let batch = all.batch(BatchKey::new(1, 0), 4, variation);
            let types = batch.types().iter().filter(|kind| **kind > 0);
            let unknown = types.clone().filter(|kind| **kind == 1).count();
            assert!(unknown >= 7 && types.count() == 8, "{:?}", batch.types());
        }
        let usual = all.batch(BatchKey::new(1, 0), 4, AS_IT_IS);
        assert!(usual.types().iter().all(|kind| *kind != 1));
    }

    #[test]
    fn values_of_open_slots_are_spliced_and_hidden_and_others_are_not() {
        let said = |city: &str, kind: &str| {
            let tags = (0..city.split(' ').count()).map(|at| if at == 0 { " B-city" } else { " I-city" });
            utterance(&format!("on {city} {kind}"), &format!("O{} B-kind", tags.collect::<String>()), "light")
        };
        // Three cities of four occur once; no kind does.
        let samples = [said("a b", "x"), said("c d e", "y"), said("f", "x"), said("f", "y"), said("g", "x")];
        let labels = Labels::of(&samples);
        let pieces = PieceTokenizer::train(&samples, 100).expect("letters fit");
        let all = EncodedUtterances::new(&samples, &labels, &pieces, 64).expect("room for words");
        assert_eq!(all.open_slots(), [labels.tag_id("B-city").expect("known") as usize]);
        let known: BTreeSet<&str> = ["a b", "c d e", "f", "g"].into();
        let id_of: HashMap<i32, char> =
            ('a'..='y').filter_map(|c| Some((i32::try_from(*pieces.word(&c.to_string()).first()?).ok()?, c))).collect();
        let (mut seen, mut kinds) = (BTreeSet::new(), BTreeSet::new());
        for step in 0..4000 {
            let batch =
                all.batch(BatchKey::new(1, step), 1, Variation { swap_values: 0.999, splice_values: 0.5, ..AS_IT_IS });
            let cells = batch.ids().iter().zip(batch.targets()).take(batch.lengths()[0] as usize);
            let (mut city, mut tags) = (Vec::new(), Vec::new());
            for (id, tag) in cells {
                match labels.tag(usize::try_from(*tag).unwrap_or(usize::MAX)).as_str() {
                    tag @ ("B-city" | "I-city") => {
                        city.push(id_of[id].to_string());
                        tags.push(tag.to_owned());
                    }
                    "B-kind" => drop(kinds.insert(id_of[id])),
                    _ => {}
                }
            }
            assert!(tags[0] == "B-city" && tags[1..].iter().all(|tag| tag == "I-city"), "{tags:?}");
            assert!((1..=3).contains(&city.len()), "no longer than the longest: {city:?}");
            seen.insert(city.join(" "));
        }
        assert_eq!(kinds, ['x', 'y'].into());
        assert!(known.iter().all(|value| seen.contains(*value)), "{seen:?}");
        for made in ["a d e", "c e", "f g", "c b", "a b e"] {
            assert!(seen.contains(made), "{made}: {seen:?}");
        }
        for never in ["b a", "d", "e", "b", "e c"] {
            assert!(!seen.contains(never), "{never}: a value begins as one does, and ends as one does");
        }
        let unknown = pieces.unknown() as i32;
        let (mut hidden, mut words) = (0, 0);
        for step in 0..400 {
            let batch = all.batch(BatchKey::new(2, step), 5, Variation { hide_values: 0.6, ..AS_IT_IS });
            for (id, tag) in batch.ids().iter().zip(batch.targets()) {
                let tag = labels.tag(usize::try_from(*tag).unwrap_or(usize::MAX));
                let is_city = tag.ends_with("-city");
                assert!(is_city || *id != unknown, "{tag} is hidden");
                words += usize::from(is_city);
                hidden += usize::from(*id == unknown);
            }
        }
        let share = hidden as f64 / words as f64;
        assert!((share - 0.3).abs() < 0.03, "{share} of the words are hidden");
    }

    #[test]
    fn unknown_labels_do_not_count() {
        let samples = [utterance("play song", "O B-city", "leave")];
        let all = EncodedUtterances::new(&samples, &Labels::of(&utterances()), &pieces(), 16).expect("room for words");
        assert_eq!(all.batches(1)[0].1.targets(), [NO, 0, NO, NO]);
    }

    #[test]
    fn a_long_utterance_is_cut_behind_a_word() {
        let all = encoded(4);
        assert_eq!(all.cut(), 2);
        assert_eq!(all.word_columns(0), [1, 2]);
        let last = all.batches(4).remove(0).1;
        assert_eq!(last.seq_length(), 4);
        let pieces = pieces();
        assert!(EncodedUtterances::new(&utterances(), &Labels::of(&utterances()), &pieces, 2).is_err());
        assert_eq!(encoded(16).cut(), 0);
    }

    #[test]
    fn every_utterance_comes_once_an_epoch() {
        let samples: Vec<Utterance> = (0..103)
            .map(|at| utterance(&"on ".repeat(1 + at % 7), &"O ".repeat(1 + at % 7), &format!("intent {at}")))
            .collect();
        let labels = Labels::of(&samples);
        let all = EncodedUtterances::new(&samples, &labels, &pieces(), 16).expect("room for words");
        assert_eq!(all.steps_per_epoch(10), 11);
        let mut orders = BTreeSet::new();
        for epoch in 0..3 {
            let batches: Vec<_> =
                (0..11).map(|step| all.batch(BatchKey::new(5, epoch * 11 + step), 10, AS_IT_IS)).collect();
            let intents: Vec<i32> =
                batches.iter().flat_map(|batch| batch.targets().iter().copied().step_by(batch.seq_length())).collect();
            assert_eq!(intents.iter().copied().collect::<BTreeSet<_>>(), (0..103).collect());
            assert_eq!(intents.len(), 103);
            assert_eq!(batches[10].batch_size(), 3);
            let cells: usize = batches.iter().map(|batch| batch.ids().len()).sum();
            let pieces: i32 = batches.iter().flat_map(|batch| batch.lengths()).sum();
            assert!(cells as f64 <= 1.1 * f64::from(pieces), "{pieces} pieces in {cells} cells");
            orders.insert(intents);
        }
        assert_eq!(orders.len(), 3);
    }

    #[test]
    fn a_batch_depends_on_its_seed_and_step_only() {
        let (all, again) = (encoded(16), encoded(16));
        let steps = [(7, 0), (7, 1), (9, 0), (7, 5), (7, 1), (7, 0)];
        let drawn: Vec<_> =
            steps.iter().map(|(seed, step)| all.batch(BatchKey::new(*seed, *step), 2, varied(0.5))).collect();
        for ((seed, step), batch) in steps.iter().zip(&drawn).rev() {
            assert_eq!(&again.batch(BatchKey::new(*seed, *step), 2, varied(0.5)), batch);
        }
        assert!((0..50).any(|seed| all.batch(BatchKey::new(seed, 0), 2, varied(0.5)) != drawn[0]));
    }

    #[test]
    fn words_are_split_into_letters_with_the_probability_asked_for() {
        let all = encoded(64);
        let pieces_at = |probability: f64| -> i32 {
            (0..500)
                .map(|step| {
                    all.batch(BatchKey::new(3, step), 4, Variation { split_words: probability, ..AS_IT_IS })
                        .lengths()
                        .iter()
                        .sum::<i32>()
                })
                .sum()
        };
        let (usual, half, letters) = (pieces_at(0.0), pieces_at(0.5), pieces_at(1.0));
        assert_eq!((usual, letters), (500 * 16, 500 * (2 + 12 + 2 + 4 + 2 + 8 + 2 + 2)));
        assert!((half - (usual + letters) / 2).abs() < (letters - usual) / 20, "{usual} {half} {letters}");
    }

    #[test]
    fn variation_never_makes_a_row_too_long() {
        let all = encoded(6);
        assert_eq!(all.cut(), 0);
        for step in 0..100 {
            let batch = all.batch(BatchKey::new(1, step), 4, Variation { split_words: 0.9, ..AS_IT_IS });
            assert!(batch.seq_length() <= 6);
            assert_eq!(batch.tag_count(), 8);
            assert!(all.batch(BatchKey::new(1, step), 4, varied(0.9)).seq_length() <= 6);
        }
    }

    #[test]
    fn the_parts_of_a_split_batch_are_its_rows() {
        let batch = encoded(16).batch(BatchKey::new(1, 0), 4, AS_IT_IS);
        let parts = batch.clone().split(3);
        assert_eq!(parts.iter().map(UtteranceBatch::batch_size).collect::<Vec<_>>(), [2, 2]);
        assert!(parts.iter().all(|part| part.seq_length() == batch.seq_length()));
        assert_eq!(parts.iter().flat_map(|part| part.ids().to_vec()).collect::<Vec<_>>(), batch.ids());
        assert_eq!(parts.iter().flat_map(|part| part.targets().to_vec()).collect::<Vec<_>>(), batch.targets());
        assert_eq!(parts.iter().flat_map(|part| part.lengths().to_vec()).collect::<Vec<_>>(), batch.lengths());
    }

    #[test]
    fn a_batch_reaches_the_device_as_it_is() {
        let batch = encoded(16).batch(BatchKey::new(1, 0), 4, AS_IT_IS);
        let there = batch.to_device::<NdArray>(&Default::default());
        assert_eq!(there.ids.dims(), [4, batch.seq_length()]);
        let values = |data: TensorData| data.iter::<i64>().map(|value| value as i32).collect::<Vec<_>>();
        assert_eq!(values(there.ids.into_data()), batch.ids());
        assert_eq!(values(there.lengths.into_data()), batch.lengths());
        let (tags, intents) = (values(there.tags.into_data()), values(there.intents.into_data()));
        for (at, target) in batch.targets().iter().enumerate() {
            let wanted = if at % batch.seq_length() == 0 { (NO, *target) } else { (*target, NO) };
            assert_eq!((tags[at], intents[at]), wanted);
        }
    }

    #[test]
    fn no_utterances_give_empty_batches() {
        let all = EncodedUtterances::new(&[], &Labels::of(&[]), &pieces(), 8).expect("room for words");
        assert!(all.is_empty() && all.batches(4).is_empty());
        assert_eq!(all.batch(BatchKey::new(1, 3), 4, AS_IT_IS).batch_size(), 0);
    }
}
