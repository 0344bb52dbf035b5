//! TensorBoard event files with the scalars of a run.
//!
//! A file is a sequence of records, each a `tensorflow.Event` protocol buffer between its length
//! and two checksums:
//!
//! ```text
//! u64 length | u32 masked CRC-32C of it | the event | u32 masked CRC-32C of that
//! ```

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::failure::Failure;
use crate::inference::class_report::ClassScores;
use crate::run_folder::TENSORBOARD;
use crate::tasks::rewards::Rewards;
use crate::tasks::scores::Scores;
use crate::tasks::validation::Validation;
use crate::training::events::{Event, Sink};
use crate::training::expert_balance::ExpertBalance;

/// A file of scalars.
pub(super) struct EventFile {
    path: PathBuf,
    file: File,
}

impl EventFile {
    /// A new file in a run's folder.
    pub(super) fn create(folder: &Path) -> Result<Self, Failure> {
        let folder = folder.join(TENSORBOARD);
        fs::create_dir_all(&folder).map_err(Failure::io(&folder))?;
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        // A run resumed within the same second appends to the same file.
        let path = folder.join(format!("events.out.tfevents.{seconds:010}.fireclay"));
        let file = File::options().create(true).append(true).open(&path).map_err(Failure::io(&path))?;
        let mut events = Self { path, file };
        let version = bytes_field(3, b"brain.Event:2");
        events.write(&[double_field(1, now()), version].concat())?;
        Ok(events)
    }

    fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<(), Failure> {
        let value = |(tag, value): &(&str, f64)| {
            let value = [bytes_field(1, tag.as_bytes()), float_field(2, *value as f32)].concat();
            bytes_field(1, &value)
        };
        let summary: Vec<u8> = scalars.iter().flat_map(value).collect();
        let event = [double_field(1, now()), varint_field(2, step), bytes_field(5, &summary)].concat();
        self.write(&event)
    }

    fn write(&mut self, event: &[u8]) -> Result<(), Failure> {
        let length = (event.len() as u64).to_le_bytes();
        let (of_length, of_event) = (masked(&length).to_le_bytes(), masked(event).to_le_bytes());
        let record = [&length[..], &of_length, event, &of_event].concat();
        self.file.write_all(&record).map_err(Failure::io(&self.path))
    }
}

impl Sink for EventFile {
    fn tell(&mut self, event: &Event) -> Result<(), Failure> {
        match *event {
            // The last of the steps that were read together stands for all.
            Event::Trained {
                step,
                loss,
                learning_rate,
                gradient_norm,
                tokens_per_second,
                rewards,
                experts,
                memory: Some(memory),
                ..
            } => {
                let mut scalars = vec![
                    ("loss/training", loss),
                    ("learning rate", learning_rate),
                    ("gradient norm", gradient_norm),
                    ("tokens per second", tokens_per_second),
                ];
                scalars.extend(memory.device.map(|device| ("memory/device", device.in_use as f64)));
                scalars.extend(memory.host.map(|host| ("memory/host", host as f64)));
                scalars.extend(rewards.into_iter().flat_map(Rewards::named));
                scalars.extend(experts.into_iter().flat_map(ExpertBalance::named));
                self.scalars(step, &scalars)
            }
            Event::Validated {
                step,
                validation: Validation { loss, scores, classes, rewards, answer_accuracy },
                ..
            } => {
                let mut scalars = vec![("loss/validation", loss)];
                if let Some(Scores { intent_accuracy, slot_f1, sentence_accuracy }) = scores {
                    scalars.extend([
                        ("scores/intent accuracy", intent_accuracy),
                        ("scores/slot F1", slot_f1),
                        ("scores/sentence accuracy", sentence_accuracy),
                    ]);
                }
                if let Some(ClassScores { accuracy, macro_f1 }) = classes {
                    scalars.extend([("scores/accuracy", accuracy), ("scores/macro F1", macro_f1)]);
                }
                scalars.extend(rewards.map(|rewards| ("rewards/validation margins", rewards.margins)));
                scalars.extend(answer_accuracy.map(|percent| ("scores/answer accuracy", percent)));
                self.scalars(step, &scalars)
            }
            _ => Ok(()),
        }
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

/// A field's number and wire type.
fn key(field: u64, kind: u64) -> Vec<u8> {
    varint(field << 3 | kind)
}

fn varint_field(field: u64, number: u64) -> Vec<u8> {
    [key(field, 0), varint(number)].concat()
}

fn double_field(field: u64, number: f64) -> Vec<u8> {
    [key(field, 1), number.to_le_bytes().to_vec()].concat()
}

fn bytes_field(field: u64, bytes: &[u8]) -> Vec<u8> {
    [key(field, 2), varint(bytes.len() as u64), bytes.to_vec()].concat()
}

fn float_field(field: u64, number: f32) -> Vec<u8> {
    [key(field, 5), number.to_le_bytes().to_vec()].concat()
}

/// CRC-32C, masked as in TensorFlow's records.
fn masked(bytes: &[u8]) -> u32 {
    let crc = bytes.iter().fold(u32::MAX, |crc, byte| {
        let mixed = crc ^ u32::from(*byte);
        (0..8).fold(mixed, |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 })
    });
    (!crc).rotate_right(15).wrapping_add(0xA282_EAD8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, B.4: 32 bytes of zero.
        let crc = masked(&[0; 32]).wrapping_sub(0xA282_EAD8).rotate_left(15);
        assert_eq!(crc, 0x8A91_36AA);
    }

    #[test]
    fn a_file_holds_what_was_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut events = EventFile::create(folder.path()).expect("writable");
        events
            .tell(&Event::Validated { step: 300, validation: Validation::of_loss(1.5), perplexity: None })
            .expect("writable");
        let mut bytes = fs::read(&events.path).expect("a file");
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight")) as usize;
            assert_eq!(masked(&bytes[..8]).to_le_bytes(), bytes[8..12]);
            let event = bytes[12..12 + length].to_vec();
            assert_eq!(masked(&event).to_le_bytes(), bytes[12 + length..16 + length]);
            records.push(event);
            bytes.drain(..16 + length);
        }
        assert_eq!(records.len(), 2);
        assert!(records[0].ends_with(b"brain.Event:2"));
        // After the time: step 300, and a summary of one value.
        let value = [&[10, 15][..], b"loss/validation", &[0x15], &1.5f32.to_le_bytes()].concat();
        let expected = [&[0x10, 0xAC, 2, 0x2A, value.len() as u8 + 2, 10, value.len() as u8][..], &value].concat();
        assert_eq!(records[1][9..], expected);
    }
}
