//! Writes a model folder as a GGUF file, tensor by tensor.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use fireclay_kernels::Backend;

use crate::error::WeightsError;
use crate::gguf::{self, ALIGNMENT, GgufKind, GgufValue, Planned};
use crate::hub::HubTensor;
use crate::parameters::parameter_shapes;
use crate::synced::write_synced;
use crate::tensor_files::{Encoding, TensorFiles, TensorRow};
use crate::weights::{ModelFolder, Part, stored_shape};

/// Values processed at a time, at least one row.
const PIECE: usize = 1 << 20;
/// Minimum blocks per thread when quantizing.
const BLOCKS: usize = 16;

/// Result of an export.
#[derive(Clone, Debug, PartialEq)]
pub struct WrittenGguf {
    /// Size of the file.
    pub bytes: u64,
    /// Mean bits per weight of the matrices.
    pub bits_a_weight: f64,
    /// Where other programs compute something else, for a note to the user.
    pub notes: Vec<String>,
}

impl ModelFolder {
    /// Writes the model as a GGUF file `out` with matrices in `kind`, with llama.cpp's tensor names
    /// and row order. `keys` are additional metadata: the model's name and its tokenizer.
    /// `progress` gets the number of values written and the total.
    ///
    /// The file is written under a temporary name, synced and renamed. The host holds a few
    /// megabytes at a time, or one whole tensor if it is stored transposed.
    ///
    /// # Errors
    /// As [`load`](Self::load), and if GGUF cannot express the model, `kind` cannot store a value,
    /// or the file system fails.
    pub fn export_gguf<B: Backend>(
        &self,
        kind: GgufKind,
        keys: &[(String, GgufValue)],
        out: &Path,
        progress: &mut dyn FnMut(u64, u64),
        device: &B::Device,
    ) -> Result<WrittenGguf, WeightsError> {
        if self.is_gguf() {
            return Err(self.wrong("already a GGUF file: export takes a model folder".into()));
        }
        let (family, config) = self.config()?;
        let plan = self.plan::<B>(family, &config, false, device)?;
        let config = &plan.config;
        let described = gguf::keys(family, config).map_err(|error| self.wrong_config(error))?;
        let shapes = parameter_shapes(&plan.model);
        let paths: Vec<String> = shapes.iter().map(|(path, _)| path.clone()).collect();
        let own = gguf::tensors(described.architecture, config, &paths).map_err(|reason| self.wrong(reason))?;

        let shape_of = |tensor: &HubTensor| {
            let shape = shapes.iter().find(|(path, _)| *path == tensor.path).map(|(_, shape)| &shape[..]);
            stored_shape(tensor, shape.unwrap_or_default())
        };
        let planned = |tensor: &HubTensor| {
            let shape = shape_of(tensor);
            let encoding = kind.encoding(&tensor.name, &shape, config.n_layers, config.tied_embeddings);
            Planned { name: tensor.name.clone(), shape, encoding }
        };
        let factors = described.factors.iter().map(|(name, values)| Planned {
            name: (*name).into(),
            shape: vec![values.len()],
            encoding: Encoding::Float(Dtype::F32),
        });
        let tensors: Vec<Planned> = own.iter().map(planned).chain(factors).collect();
        let general = [
            ("general.architecture", described.architecture.name().into()),
            ("general.type", "model".into()),
            ("general.file_type", GgufValue::Size(kind.file_type())),
            ("general.quantization_version", GgufValue::Size(2)),
        ];
        let mut all: Vec<(String, GgufValue)> =
            general.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        all.extend(described.keys);
        all.extend(keys.iter().cloned());
        let front = gguf::front(&all, &tensors);

        let size = |tensor: &Planned| tensor.shape.iter().product::<usize>() as u64;
        let total = tensors.iter().map(size).sum();
        let mut done = 0;
        let mut told = |values: usize| {
            done += values as u64;
            progress(done, total);
        };
        write_synced(out, |path| {
            let mut output = Output { file: BufWriter::new(File::create(path)?), bytes: Vec::new() };
            output.file.write_all(&front)?;
            let mut source: Option<(&str, Source<'_>)> = None;
            for (tensor, planned) in own.iter().zip(&tensors) {
                // The tensors of one parameter are consecutive, in the order of its rows.
                if source.as_ref().is_none_or(|(path, _)| *path != tensor.path) {
                    let parts = plan.parts.get(&tensor.path).map(Vec::as_slice).unwrap_or_default();
                    let of = Source::of(&plan.files, parts).map_err(std::io::Error::other)?;
                    source = Some((&tensor.path, of));
                }
                let Some((_, source)) = &mut source else { continue };
                output.tensor(tensor, planned, source, &mut told)?;
            }
            for ((_, values), planned) in described.factors.iter().zip(&tensors[own.len()..]) {
                output.put(values, planned)?;
                output.pad(planned.bytes())?;
            }
            output.file.flush()
        })
        .map_err(|error| match error {
            // Errors of the source passed through the closure.
            WeightsError::Io { path, error } => match error.downcast::<WeightsError>() {
                Ok(own) => own,
                Err(error) => WeightsError::Io { path, error },
            },
            other => other,
        })?;
        let bytes = |tensor: &Planned| tensor.bytes() as u64;
        let matrices = || tensors.iter().filter(|tensor| tensor.shape.len() > 1);
        let weights: u64 = matrices().map(size).sum();
        Ok(WrittenGguf {
            bytes: front.len() as u64
                + tensors.iter().map(|tensor| bytes(tensor).next_multiple_of(ALIGNMENT as u64)).sum::<u64>(),
            bits_a_weight: 8.0 * matrices().map(bytes).sum::<u64>() as f64 / weights.max(1) as f64,
            notes: described.notes,
        })
    }
}

/// The values of a parameter, row-major.
enum Source<'a> {
    /// Read on demand.
    Row(TensorRow<'a>),
    /// All values of transposed tensors, and the index of the next one.
    Held(Vec<f32>, usize),
}

impl<'a> Source<'a> {
    fn of(files: &'a TensorFiles, parts: &'a [Part]) -> Result<Self, WeightsError> {
        if !parts.iter().any(|part| part.transposed) {
            return Ok(Self::Row(TensorRow::new(files, parts.iter().map(|part| &part.stored))));
        }
        let mut all = Vec::new();
        for part in parts {
            let begin = all.len();
            all.resize(begin + part.stored.shape.iter().product::<usize>(), 0f32);
            files.read(&part.stored, part.transposed, &mut all[begin..], &mut |_| {})?;
        }
        Ok(Self::Held(all, 0))
    }

    fn next(&mut self, out: &mut [f32]) -> Result<(), WeightsError> {
        match self {
            Self::Held(values, at) => {
                out.copy_from_slice(&values[*at..][..out.len()]);
                *at += out.len();
            }
            Self::Row(row) => {
                let mut bytes = vec![0; 4 * out.len()];
                row.read::<f32>(&mut bytes, &mut |_| {})?;
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *out = f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
        }
        Ok(())
    }
}

/// The output file.
struct Output {
    file: BufWriter<File>,
    bytes: Vec<u8>,
}

impl Output {
    fn tensor(
        &mut self,
        tensor: &HubTensor,
        planned: &Planned,
        source: &mut Source<'_>,
        told: &mut dyn FnMut(usize),
    ) -> std::io::Result<()> {
        let rows = planned.shape[0];
        let columns: usize = planned.shape[1..].iter().product();
        let heads = tensor.interleaved.unwrap_or(1);
        let together = (PIECE / columns.max(1)).max(1).next_multiple_of(heads);
        let (mut values, mut ordered) = (Vec::new(), Vec::new());
        for first in (0..rows).step_by(together) {
            let count = together.min(rows - first) * columns;
            values.resize(count, 0f32);
            source.next(&mut values).map_err(std::io::Error::other)?;
            if heads > 1 {
                // Interleave the halves of each head.
                ordered.clear();
                for head in values.chunks_exact(heads * columns) {
                    let row = |row: usize| &head[row * columns..][..columns];
                    (0..heads).for_each(|at| ordered.extend_from_slice(row(at % 2 * (heads / 2) + at / 2)));
                }
                std::mem::swap(&mut values, &mut ordered);
            }
            self.put(&values, planned)?;
            told(count);
        }
        self.pad(planned.bytes())
    }

    /// Writes values in the tensor's encoding.
    fn put(&mut self, values: &[f32], planned: &Planned) -> std::io::Result<()> {
        let wrong = |what: &str| {
            let (name, encoding) = (planned.name.clone(), planned.encoding.name());
            std::io::Error::other(WeightsError::Unwritable {
                name,
                reason: format!("{what}, which {encoding} cannot store"),
            })
        };
        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let wide = matches!(planned.encoding, Encoding::Float(Dtype::F32 | Dtype::BF16));
        if !wide && values.iter().any(|value| !value.is_finite()) {
            return Err(wrong("a value is infinite or not a number"));
        }
        if !wide && largest > f16::MAX.to_f32() {
            return Err(wrong(&format!("a value has magnitude {largest}")));
        }
        self.bytes.clear();
        match planned.encoding {
            Encoding::Float(Dtype::F16) => {
                self.bytes.extend(values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()));
            }
            Encoding::Float(Dtype::BF16) => {
                self.bytes.extend(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()));
            }
            Encoding::Float(_) | Encoding::Packed(_) => {
                self.bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()))
            }
            Encoding::Blocks(format) => {
                self.bytes.resize(values.len() / format.weights() * format.bytes(), 0);
                let outs = self.bytes.par_chunks_mut(BLOCKS * format.bytes());
                let pieces = outs.zip(values.par_chunks(BLOCKS * format.weights()));
                pieces.for_each(|(out, values)| format.quantize(values, out));
            }
        }
        self.file.write_all(&self.bytes)
    }

    /// Pads a tensor to the alignment.
    fn pad(&mut self, bytes: usize) -> std::io::Result<()> {
        self.file.write_all(&[0; ALIGNMENT][..bytes.next_multiple_of(ALIGNMENT) - bytes])
    }
}
