//! Writes the header of a GGUF file: metadata and tensor descriptions.

use crate::tensor_files::Encoding;

use super::header::type_number;

/// Alignment of tensors, in bytes.
pub(crate) const ALIGNMENT: usize = 32;

/// A metadata value to write.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// An unsigned integer.
    Size(u32),
    /// A number.
    Number(f32),
    /// A boolean.
    Flag(bool),
    /// A string.
    Text(String),
    /// A list of strings.
    Strings(Vec<String>),
    /// A list of integers.
    Integers(Vec<i32>),
    /// A list of numbers.
    Numbers(Vec<f32>),
}

macro_rules! from {
    ($($type:ty => $variant:ident),*) => {
        $(impl From<$type> for GgufValue {
            fn from(value: $type) -> Self {
                Self::$variant(value.into())
            }
        })*
    };
}

from!(u32 => Size, f32 => Number, bool => Flag, String => Text, &str => Text, Vec<String> => Strings,
    Vec<i32> => Integers, Vec<f32> => Numbers);

/// A tensor to write.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Planned {
    pub(crate) name: String,
    /// Outermost first.
    pub(crate) shape: Vec<usize>,
    pub(crate) encoding: Encoding,
}

impl Planned {
    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() / self.encoding.weights() * self.encoding.bytes()
    }
}

/// The bytes of a file before its first tensor. The tensors follow in this order, each padded to
/// [`ALIGNMENT`].
pub(crate) fn front(keys: &[(String, GgufValue)], tensors: &[Planned]) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((keys.len() as u64).to_le_bytes());
    for (name, value) in keys {
        text(&mut out, name);
        put(&mut out, value);
    }
    let mut offset = 0;
    for tensor in tensors {
        text(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        out.extend(tensor.shape.iter().rev().flat_map(|length| (*length as u64).to_le_bytes()));
        out.extend(type_number(tensor.encoding).to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Writes a type number and a value.
fn put(out: &mut Vec<u8>, value: &GgufValue) {
    let kind = |out: &mut Vec<u8>, kind: u32| out.extend(kind.to_le_bytes());
    let list = |out: &mut Vec<u8>, of: u32, length: usize| {
        kind(out, 9);
        kind(out, of);
        out.extend((length as u64).to_le_bytes());
    };
    match value {
        GgufValue::Size(value) => {
            kind(out, 4);
            out.extend(value.to_le_bytes());
        }
        GgufValue::Number(value) => {
            kind(out, 6);
            out.extend(value.to_le_bytes());
        }
        GgufValue::Flag(value) => {
            kind(out, 7);
            out.push(u8::from(*value));
        }
        GgufValue::Text(value) => {
            kind(out, 8);
            text(out, value);
        }
        GgufValue::Strings(values) => {
            list(out, 8, values.len());
            values.iter().for_each(|value| text(out, value));
        }
        GgufValue::Integers(values) => {
            list(out, 5, values.len());
            out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        GgufValue::Numbers(values) => {
            list(out, 6, values.len());
            out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
    }
}
