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

    /// The log-probabilities of the intents of a row.
    pub(crate) fn intents(&self, row: usize) -> &[f32] {
        &self.intents[row * self.intent_count..(row + 1) * self.intent_count]
    }

    /// The log-probabilities of the tags of each word that starts at `columns` of a row.
    pub(crate) fn tags(&self, row: usize, columns: &[usize]) -> Vec<&[f32]> {
        let words = columns.iter().map(|column| {
            let start = (row * self.seq_length + column) * self.tag_count;
            &self.tags[start..start + self.tag_count]
        });
        words.collect()
    }
}

/// Finds the best intent and tags.
///
/// Tags are well-formed: no span continues without having started. If the labels say which slots
/// each intent has in training, intent and tags are decoded together: each span of a slot that the
/// intent never has there costs [`Labels::novelty`].
#[derive(Clone, Debug)]
pub(crate) struct Decoder {
    /// For each intent, what each tag costs; empty if nothing does.
    costs: Vec<Vec<f32>>,
}

impl Decoder {
    pub(crate) fn of(labels: &Labels) -> Self {
        let of_intent = |intent: &String| {
            let cost = |tag: usize| match labels.slots.get(tag / 2) {
                Some(slot) if tag % 2 == 1 => labels.novelty(intent, slot) as f32,
                _ => 0.0,
            };
            (0..labels.tag_count()).map(cost).collect()
        };
        match labels.intent_slots.is_empty() {
            true => Self { costs: Vec::new() },
            false => Self { costs: labels.intents.iter().map(of_intent).collect() },
        }
    }

    /// The best intent of an utterance and the tags of each of its parts, from log-probabilities:
    /// of the intents, and of each word's tags.
    pub(crate) fn decode<W: AsRef<[f32]>>(&self, intents: &[f64], parts: &[Vec<W>]) -> (usize, Vec<Vec<usize>>) {
        let best_of = |costs: &[f32]| -> (Vec<Vec<usize>>, f64) {
            let found = parts.iter().map(|words| best_tags(words.iter().map(AsRef::as_ref), costs));
            let (tags, scores): (Vec<_>, Vec<_>) = found.unzip();
            (tags, scores.into_iter().map(f64::from).sum())
        };
        let mut order: Vec<usize> = (0..intents.len()).collect();
        order.sort_by(|a, b| intents[*b].total_cmp(&intents[*a]));
        let (free, most) = best_of(&[]);
        let mut best: Option<(f64, usize, Vec<Vec<usize>>)> = None;
        for intent in order {
            // Costs only lower a score.
            if best.as_ref().is_some_and(|(score, ..)| *score >= intents[intent] + most) {
                break;
            }
            let costs = self.costs.get(intent).map_or(&[][..], Vec::as_slice);
            let is_free = free.iter().flatten().all(|tag| costs.get(*tag).is_none_or(|cost| *cost == 0.0));
            let (tags, score) = if is_free { (free.clone(), most) } else { best_of(costs) };
            let score = intents[intent] + score;
            if best.as_ref().is_none_or(|(other, ..)| score > *other) {
                best = Some((score, intent, tags));
            }
        }
        best.map_or((0, free), |(_, intent, tags)| (intent, tags))
    }
}

fn argmax(odds: &[f32]) -> usize {
    odds.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(index, _)| index)
}

/// The most probable tag sequence in which no span continues without having started, with its score
/// (Viterbi, 1967): `I-x` follows only `B-x` or `I-x`. `odds` are the log-probabilities of each
/// word's tags: 0 is `O`, an odd tag starts a span, and the even tag after it continues it. `costs`
/// are added to them, if there are any.
fn best_tags<'a>(odds: impl Iterator<Item = &'a [f32]>, costs: &[f32]) -> (Vec<usize>, f32) {
    let goes_on = |tag: usize| tag > 0 && tag.is_multiple_of(2);
    let cost = |tag: usize| costs.get(tag).copied().unwrap_or(0.0);
    let mut scores: Vec<f32> = Vec::new();
    let mut origins: Vec<Vec<usize>> = Vec::new();
    for odds in odds {
        if scores.is_empty() {
            let begun = |(tag, odds): (usize, &f32)| if goes_on(tag) { f32::NEG_INFINITY } else { odds + cost(tag) };
            scores = odds.iter().enumerate().map(begun).collect();
            continue;
        }
        let any = argmax(&scores);
        let origin = |tag: usize| match goes_on(tag) {
            true if scores[tag - 1] >= scores[tag] => tag - 1,
            true => tag,
            false => any,
        };
        let from: Vec<usize> = (0..odds.len()).map(origin).collect();
        let added = |(tag, (origin, odds)): (usize, (&usize, &f32))| scores[*origin] + odds + cost(tag);
        scores = from.iter().zip(odds).enumerate().map(added).collect();
        origins.push(from);
    }
    if scores.is_empty() {
        return (Vec::new(), 0.0);
    }
    let last = argmax(&scores);
    let mut tags = vec![last];
    for from in origins.iter().rev() {
        tags.push(from[tags[tags.len() - 1]]);
    }
    tags.reverse();
    (tags, scores[last])
}

#[cfg(test)]
mod tests {
    use fireclay_datasets::IntentSlots;

    use super::*;

    /// Tags: O, B-a, I-a, B-b, I-b.
    #[test]
    fn a_span_never_goes_on_without_having_begun() {
        let rows = [[-3.0, -2.0, -0.1, -4.0, -5.0], [-1.0, -2.5, -0.5, -3.0, -0.4], [-0.1, -3.0, -2.0, -3.0, -3.0]];
        assert_eq!(best_tags(rows.iter().map(|row| &row[..]), &[]).0, [1, 2, 0]);
    }

    #[test]
    fn without_conflicts_every_word_has_its_likeliest_tag() {
        let rows = [[-0.1, -3.0, -3.0], [-3.0, -0.1, -3.0], [-3.0, -2.0, -0.1], [-3.0, -0.1, -0.2]];
        assert_eq!(best_tags(rows.iter().map(|row| &row[..]), &[]).0, [0, 1, 2, 1]);
        assert!(best_tags(std::iter::empty(), &[]).0.is_empty());
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
            let found = best_tags(rows.iter().map(|row| &row[..]), &[]).0;
            assert!(formed(&found), "{found:?}");
            assert!((score(&found) - score(&best.expect("there is one"))).abs() < 1e-5, "{found:?}");
        }
    }

    /// Intents `ask` and `wave`, slots `a` and `b`; half of the utterances have each intent, and
    /// `wave` never has `a`.
    fn labels(utterances: usize) -> Labels {
        let of = |slots: &[&str]| IntentSlots {
            utterances,
            slots: slots.iter().map(|slot| ((*slot).into(), utterances)).collect(),
        };
        Labels {
            intents: vec!["ask".into(), "wave".into()],
            slots: vec!["a".into(), "b".into()],
            marks: Vec::new(),
            words: Vec::new(),
            intent_slots: [("ask".into(), of(&["a", "b"])), ("wave".into(), of(&["b"]))].into(),
        }
    }

    #[test]
    fn an_intent_and_a_slot_that_exclude_each_other_are_not_decoded_together() {
        let logs = |odds: &[f64]| odds.iter().map(|odds| odds.ln()).collect::<Vec<_>>();
        let tags = |odds: &[f32]| vec![odds.iter().map(|odds| odds.ln()).collect::<Vec<f32>>()];
        let (joint, apart) = (Decoder::of(&labels(98)), Decoder::of(&Labels { intent_slots: [].into(), ..labels(98) }));
        // O, B-a, I-a, B-b, I-b.
        let one = [0.1, 0.6, 0.1, 0.15, 0.05];
        for (intents, words, wanted) in [
            // The slot decides, then the intent.
            ([0.4, 0.6], one, (0, 1)),
            ([0.1, 0.9], one, (1, 3)),
            // Nothing excludes the other.
            ([0.6, 0.4], one, (0, 1)),
            ([0.4, 0.6], [0.1, 0.1, 0.1, 0.6, 0.1], (1, 3)),
            // So sure that even 1 in 50 is more.
            ([0.0001, 0.9999], [1e-5, 0.99, 1e-5, 1e-5, 1e-5], (1, 1)),
        ] {
            let intents = logs(&intents);
            let found = joint.decode(&intents, &[tags(&words)]);
            assert_eq!((found.0, found.1[0][0]), wanted, "{intents:?} {words:?}");
            let alone = usize::from(intents[1] > intents[0]);
            assert_eq!(apart.decode(&intents, &[tags(&words)]).0, alone);
        }
        assert_eq!(joint.decode::<Vec<f32>>(&[-1.0, -0.1], &[]), (1, Vec::new()));
    }

    #[test]
    fn the_best_pair_of_intent_and_tags_is_found_among_all() {
        let key = fireclay_kernels::RandomKey::new(5);
        let mut changed = 0;
        for case in 0..200u32 {
            let labels = labels(1 + case as usize % 30);
            let draw = |row: u32, count: u32| -> Vec<f32> {
                (0..count).map(|at| 2.0 * key.uniform(case * 20 + row, at).ln() as f32).collect()
            };
            let intents: Vec<f64> = draw(0, 2).into_iter().map(f64::from).collect();
            let parts: Vec<Vec<Vec<f32>>> = (0..1 + case % 2)
                .map(|part| (0..1 + case % 3).map(|word| draw(1 + part * 5 + word, 5)).collect())
                .collect();
            let formed = |tags: &[usize]| {
                tags.iter()
                    .enumerate()
                    .all(|(at, tag)| *tag == 0 || tag % 2 == 1 || (at > 0 && [tag - 1, *tag].contains(&tags[at - 1])))
            };
            let score = |intent: usize, tags: &[Vec<usize>]| -> f64 {
                let word = |(tag, odds): (&usize, &Vec<f32>)| {
                    let slot = if tag % 2 == 1 { Some(&labels.slots[tag / 2]) } else { None };
                    f64::from(odds[*tag]) + slot.map_or(0.0, |slot| labels.novelty(&labels.intents[intent], slot))
                };
                let part = |(tags, words): (&Vec<usize>, &Vec<Vec<f32>>)| tags.iter().zip(words).map(word).sum::<f64>();
                intents[intent] + tags.iter().zip(&parts).map(part).sum::<f64>()
            };
            // Parts do not depend on each other, given the intent.
            let best = (0..2).map(|intent| {
                let tags = parts.iter().enumerate().map(|(at, words)| {
                    let count = words.len() as u32;
                    let all = (0..5usize.pow(count))
                        .map(|number| (0..count).map(|word| number / 5usize.pow(word) % 5).collect::<Vec<_>>());
                    let alone = |tags: &Vec<usize>| {
                        let mut one = vec![Vec::new(); parts.len()];
                        one[at] = tags.clone();
                        score(intent, &one)
                    };
                    all.filter(|tags| formed(tags)).max_by(|a, b| alone(a).total_cmp(&alone(b))).expect("tags")
                });
                score(intent, &tags.collect::<Vec<_>>())
            });
            let best = best.fold(f64::NEG_INFINITY, f64::max);
            let (intent, tags) = Decoder::of(&labels).decode(&intents, &parts);
            assert!(tags.iter().all(|tags| formed(tags)));
            assert!((score(intent, &tags) - best).abs() < 1e-4, "case {case}: {} {best}", score(intent, &tags));
            let apart = Decoder { costs: Vec::new() }.decode(&intents, &parts);
            changed += usize::from(apart != (intent, tags));
        }
        assert!((20..180).contains(&changed), "{changed}");
    }
}
