//! Decodes a model's outputs for utterances: an intent, and well-formed tags.

use std::path::Path;

use burn::tensor::{DType, Tensor, activation};
use fireclay_datasets::Labels;
use fireclay_kernels::Backend;
use fireclay_model::{Transformer, UtteranceHeads};

use crate::device_read::recorded;
use crate::failure::Failure;

/// Reads a model folder's `labels.json`.
///
/// # Errors
/// If it is missing or damaged.
pub(crate) fn read_labels(file: &Path) -> Result<Labels, Failure> {
    let text = std::fs::read_to_string(file).map_err(Failure::io(file))?;
    serde_json::from_str(&text).map_err(|error| Failure::new(format!("{}: no labels: {error}", file.display())))
}

/// A model's heads for utterances.
///
/// # Errors
/// If it has none.
pub(crate) fn heads<B: Backend>(model: &Transformer<B>) -> Result<&UtteranceHeads<B>, Failure> {
    model.heads.as_ref().ok_or_else(|| Failure::new("the model has no heads for intents and tags"))
}

/// Log-probabilities of a batch, on the host.
pub(crate) struct Predictions {
    intents: Vec<f32>,
    intent_count: usize,
    tags: Vec<f32>,
    tag_count: usize,
    seq_length: usize,
}

impl Predictions {
    /// Reads logits `[batch_size, intents]` and `[batch_size, seq_length, tags]`.
    pub(crate) fn read<B: Backend>((intents, tags): (Tensor<B, 2>, Tensor<B, 3>)) -> Result<Self, Failure> {
        let ([_, intent_count], [_, seq_length, tag_count]) = (intents.dims(), tags.dims());
        let values = |logits: Tensor<B, 1>| {
            let data = recorded(logits.try_into_data())
                .map_err(|error| Failure::new(format!("the device failed: {error:?}")))?;
            Ok::<Vec<f32>, Failure>(data.iter::<f32>().collect())
        };
        let intents = values(activation::log_softmax(intents.cast(DType::F32), 1).flatten(0, 1))?;
        let tags = values(activation::log_softmax(tags.cast(DType::F32), 2).flatten(0, 2))?;
        Ok(Self { intents, intent_count, tags, tag_count, seq_length })
    }

    /// The most probable intent of a row, and the log-probabilities of all.
    pub(crate) fn intent(&self, row: usize) -> (usize, &[f32]) {
        let odds = &self.intents[row * self.intent_count..(row + 1) * self.intent_count];
        (argmax(odds), odds)
    }

    /// The most probable well-formed tags of the words that start at `columns` of a row.
    pub(crate) fn tags(&self, row: usize, columns: &[usize], labels: &Labels) -> Vec<String> {
        let steps = columns.iter().map(|column| {
            let start = (row * self.seq_length + column) * self.tag_count;
            &self.tags[start..start + self.tag_count]
        });
        best_tags(steps).into_iter().map(|tag| labels.tag(tag)).collect()
    }
}

fn argmax(odds: &[f32]) -> usize {
    odds.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(index, _)| index)
}

/// The most probable tag sequence in which no span continues without having started (Viterbi,
/// 1967): `I-x` follows only `B-x` or `I-x`. `odds` are the log-probabilities of each word's tags:
/// 0 is `O`, an odd tag starts a span, and the even tag after it continues it.
fn best_tags<'a>(odds: impl Iterator<Item = &'a [f32]>) -> Vec<usize> {
    let goes_on = |tag: usize| tag > 0 && tag.is_multiple_of(2);
    let mut scores: Vec<f32> = Vec::new();
    let mut origins: Vec<Vec<usize>> = Vec::new();
    for odds in odds {
        if scores.is_empty() {
            scores = odds.to_vec();
            scores.iter_mut().enumerate().filter(|(tag, _)| goes_on(*tag)).for_each(|(_, s)| *s = f32::NEG_INFINITY);
            continue;
        }
        let any = argmax(&scores);
        let origin = |tag: usize| match goes_on(tag) {
            true if scores[tag - 1] >= scores[tag] => tag - 1,
            true => tag,
            false => any,
        };
        let from: Vec<usize> = (0..odds.len()).map(origin).collect();
        scores = from.iter().zip(odds).map(|(origin, odds)| scores[*origin] + odds).collect();
        origins.push(from);
    }
    if scores.is_empty() {
        return Vec::new();
    }
    let mut tags = vec![argmax(&scores)];
    for from in origins.iter().rev() {
        tags.push(from[tags[tags.len() - 1]]);
    }
    tags.reverse();
    tags
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tags: O, B-a, I-a, B-b, I-b.
    #[test]
    fn a_span_never_goes_on_without_having_begun() {
        let rows = [[-3.0, -2.0, -0.1, -4.0, -5.0], [-1.0, -2.5, -0.5, -3.0, -0.4], [-0.1, -3.0, -2.0, -3.0, -3.0]];
        assert_eq!(best_tags(rows.iter().map(|row| &row[..])), [1, 2, 0]);
    }

    #[test]
    fn without_conflicts_every_word_has_its_likeliest_tag() {
        let rows = [[-0.1, -3.0, -3.0], [-3.0, -0.1, -3.0], [-3.0, -2.0, -0.1], [-3.0, -0.1, -0.2]];
        assert_eq!(best_tags(rows.iter().map(|row| &row[..])), [0, 1, 2, 1]);
        assert!(best_tags(std::iter::empty()).is_empty());
    }

    #[test]
    fn the_likeliest_sequence_is_found_among_all_well_formed_ones() {
        let key = fireclay_kernels::RandomKey::new(3);
        for case in 0..200u32 {
            let (words, tags) = (1 + case as usize % 4, 5);
            let rows: Vec<Vec<f32>> = (0..words as u32)
                .map(|word| (0..tags).map(|tag| key.uniform(case * 10 + word, tag).ln() as f32).collect())
                .collect();
            let formed = |sequence: &[usize]| {
                sequence.iter().enumerate().all(|(at, tag)| {
                    *tag == 0 || tag % 2 == 1 || (at > 0 && [tag - 1, *tag].contains(&sequence[at - 1]))
                })
            };
            let score = |sequence: &[usize]| -> f32 { sequence.iter().zip(&rows).map(|(tag, row)| row[*tag]).sum() };
            let all = (0..(tags as usize).pow(words as u32)).map(|number| -> Vec<usize> {
                (0..words).map(|word| number / (tags as usize).pow(word as u32) % tags as usize).collect()
            });
            let best = all.filter(|sequence| formed(sequence)).max_by(|a, b| score(a).total_cmp(&score(b)));
            let found = best_tags(rows.iter().map(|row| &row[..]));
            assert!(formed(&found), "{found:?}");
            assert!((score(&found) - score(&best.expect("there is one"))).abs() < 1e-5, "{found:?}");
        }
    }
}
