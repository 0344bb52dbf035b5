//! Matrices of quantized checkpoints, each stored in several tensors.
//!
//! [`gather`] replaces the tensors of a matrix by one with the matrix's own name and shape, which
//! is then checked as a float tensor is. The matrix is unpacked when it is read.

use std::collections::BTreeMap;
use std::sync::Arc;

use fireclay_kernels::packed::{self, Awq, Bnb4, Bnb4Scales, CodedMatrix, Coding, Compressed, Gptq};
use safetensors::tensor::Dtype;
use serde_json::Value;

use crate::error::WeightsError;
use crate::hub::Quantization;
use crate::stored_tensor::{Encoding, Nested, Packed, StoredTensor};
use crate::tensor_files::TensorFiles;

/// Removes the tensors of matrices, and collects the matrices.
struct Taker<'a> {
    tensors: &'a mut BTreeMap<String, StoredTensor>,
    made: Vec<(String, StoredTensor)>,
}

type Reason = String;

impl Taker<'_> {
    /// Base names of the tensors that end in `suffix`.
    fn bases(&self, suffix: &str) -> Vec<String> {
        self.tensors.keys().filter_map(|name| name.strip_suffix(suffix)).map(String::from).collect()
    }

    fn take(&mut self, name: &str) -> Option<StoredTensor> {
        self.tensors.remove(name)
    }

    fn needed(&mut self, name: &str) -> Result<StoredTensor, Reason> {
        self.take(name).ok_or_else(|| format!("{name} is missing"))
    }

    fn put(&mut self, name: String, shape: Vec<usize>, packed: Packed) {
        let stored = StoredTensor::packed(packed.name(), shape, Arc::new(packed));
        self.made.push((name, stored));
    }

    /// Removes tensors with these suffixes, which do not change weights.
    fn drop_all(&mut self, endings: &[&str]) {
        self.tensors.retain(|name, _| !endings.iter().any(|ending| name.ends_with(ending)));
    }
}

const WORDS: &[Dtype] = &[Dtype::I32];
const BYTES: &[Dtype] = &[Dtype::U8];
const SIGNED: &[Dtype] = &[Dtype::I8];
const FLOATS: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];
const EIGHTH: &[Dtype] = &[Dtype::F8_E4M3];

/// Checks dtype and shape; a length of 0 matches any.
fn check(name: &str, tensor: &StoredTensor, dtypes: &[Dtype], shape: &[usize]) -> Result<(), Reason> {
    let fits = |(own, wanted): (&usize, &usize)| *wanted == 0 || own == wanted;
    if tensor.shape.len() != shape.len() || !tensor.shape.iter().zip(shape).all(fits) {
        return Err(format!("{name} has shape {:?} instead of {shape:?}", tensor.shape));
    }
    match tensor.encoding {
        Encoding::Float(dtype) if dtypes.contains(&dtype) => Ok(()),
        other => Err(format!("{name} has dtype {} instead of {:?}", other.name(), dtypes[0])),
    }
}

/// Replaces the tensors of each matrix by the matrix.
///
/// # Errors
/// If a tensor of a matrix is missing, or its shape or dtype does not fit the others.
pub(crate) fn gather(files: &mut TensorFiles, quantization: &Quantization) -> Result<(), WeightsError> {
    let states = match quantization {
        Quantization::Bnb4 => states(files)?,
        _ => BTreeMap::new(),
    };
    let mut taker = Taker { tensors: files.tensors_mut(), made: Vec::new() };
    let gathered = match quantization {
        Quantization::Bnb4 => states.into_iter().try_for_each(|(name, state)| bnb4(&mut taker, name, &state)),
        Quantization::Bnb8 => all(&mut taker, ".SCB", bnb8),
        Quantization::Gptq { bits, group, zero_offset } => {
            all(&mut taker, ".qweight", |taker, base| gptq(taker, base, *bits, *group, *zero_offset))
        }
        Quantization::Awq { group } => all(&mut taker, ".qweight", |taker, base| awq(taker, base, *group)),
        Quantization::Fp8 { block } => {
            taker.drop_all(&[".activation_scale", ".input_scale"]);
            all(&mut taker, ".weight_scale_inv", |taker, base| {
                let scale = format!("{base}.weight_scale_inv");
                scaled(taker, base, &scale, true, *block, None)
            })
        }
        Quantization::FbgemmFp8 => {
            taker.drop_all(&[".input_scale_ub"]);
            all(&mut taker, ".weight_scale", |taker, base| {
                scaled(taker, base, &format!("{base}.weight_scale"), true, None, None)
            })
        }
        Quantization::Scaled { is_float, block, group } => {
            taker.drop_all(&[
                ".input_scale",
                ".output_scale",
                ".k_scale",
                ".v_scale",
                ".weight_zero_point",
                ".input_zero_point",
            ]);
            all(&mut taker, ".weight_scale", |taker, base| {
                scaled(taker, base, &format!("{base}.weight_scale"), *is_float, *block, *group)
            })
        }
        Quantization::Packed { bits, group, has_zeros } => {
            taker.drop_all(&[".input_scale", ".output_scale", ".k_scale", ".v_scale"]);
            all(&mut taker, ".weight_packed", |taker, base| compressed(taker, base, *bits, *group, *has_zeros))
        }
        Quantization::Mxfp4 => all(&mut taker, "_blocks", mxfp4),
    };
    // FP8 without a scale is an error here.
    let scale = match quantization {
        Quantization::Fp8 { .. } => Some("weight_scale_inv"),
        Quantization::FbgemmFp8 | Quantization::Scaled { is_float: true, .. } => Some("weight_scale"),
        _ => None,
    };
    let bare = taker.tensors.iter().find(|(_, tensor)| tensor.encoding == Encoding::Float(Dtype::F8_E4M3));
    let gathered = gathered.and_then(|()| match (scale, bare) {
        (Some(scale), Some((name, _))) => {
            Err(format!("{}.{scale} is missing", name.strip_suffix(".weight").unwrap_or(name)))
        }
        _ => Ok(()),
    });
    let made = std::mem::take(&mut taker.made);
    gathered.map_err(|reason| files.wrong(reason))?;
    for (name, stored) in made {
        if files.tensors_mut().insert(name.clone(), stored).is_some() {
            return Err(files.wrong(format!("{name} is stored twice, quantized and not")));
        }
    }
    Ok(())
}

fn all(
    taker: &mut Taker<'_>,
    suffix: &str,
    mut each: impl FnMut(&mut Taker<'_>, &str) -> Result<(), Reason>,
) -> Result<(), Reason> {
    taker.bases(suffix).iter().try_for_each(|base| each(taker, base))
}

const STATES: [&str; 2] = [".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"];

/// The quantization state and nibble values of each 4-bit bitsandbytes matrix.
fn states(files: &mut TensorFiles) -> Result<BTreeMap<String, (Value, Vec<f32>)>, WeightsError> {
    let mut found = BTreeMap::new();
    for (name, tensor) in files.tensors() {
        let Some(base) = STATES.iter().find_map(|ending| name.strip_suffix(ending)) else { continue };
        let state = serde_json::from_slice(&files.raw(tensor)?)
            .map_err(|error| files.wrong(format!("{name} is not JSON: {error}")))?;
        let table = files.tensors().get(&format!("{base}.quant_map"));
        let table = table.ok_or_else(|| files.wrong(format!("{base}.quant_map is missing")))?;
        check(base, table, &[Dtype::F32], &[16]).map_err(|reason| files.wrong(reason))?;
        found.insert(base.to_string(), (state, files.floats(table)?));
    }
    Ok(found)
}

fn bnb4(taker: &mut Taker<'_>, name: String, (state, table): &(Value, Vec<f32>)) -> Result<(), Reason> {
    for ending in STATES.into_iter().chain([".quant_map"]) {
        taker.take(&format!("{name}{ending}"));
    }
    let size = |key: &str| match state[key].as_u64().filter(|size| (1..=1 << 24).contains(size)) {
        Some(size) => Ok(size as usize),
        None => Err(format!("{name}: {key} is {}, which is no size", state[key])),
    };
    let shape: Vec<usize> = state["shape"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|size| size.as_u64())
        .map(|size| size as usize)
        .collect();
    let [rows, columns] = shape[..] else {
        return Err(format!("{name}: shape is {}, and not that of a matrix", state["shape"]));
    };
    let weights =
        rows.checked_mul(columns).filter(|weights| *weights > 0).ok_or(format!("{name}: shape is {shape:?}"))?;
    let block = size("blocksize")?;
    let blocks = weights.div_ceil(block);
    let (weight, scales) = (taker.needed(&name)?, taker.needed(&format!("{name}.absmax"))?);
    // Any dtype: only the bytes matter.
    if weight.bytes() != weights.div_ceil(2) as u64 {
        return Err(format!("{name} has {} bytes instead of {}", weight.bytes(), weights.div_ceil(2)));
    }
    let nested = match taker.take(&format!("{name}.nested_absmax")) {
        None => None,
        Some(own) => {
            let (table, size) = (taker.needed(&format!("{name}.nested_quant_map"))?, size("nested_blocksize")?);
            check(&format!("{name}.nested_quant_map"), &table, &[Dtype::F32], &[256])?;
            check(&format!("{name}.nested_absmax"), &own, FLOATS, &[blocks.div_ceil(size)])?;
            let offset = state["nested_offset"].as_f64().ok_or(format!("{name}: nested_offset is missing"))? as f32;
            Some(Nested { scales: own, table, size, offset })
        }
    };
    check(&format!("{name}.absmax"), &scales, if nested.is_some() { BYTES } else { FLOATS }, &[blocks])?;
    let mut entries = [0.0; 16];
    entries.copy_from_slice(table);
    taker.put(name, vec![rows, columns], Packed::Bnb4 { weight, scales, table: entries, block, nested });
    Ok(())
}

fn bnb8(taker: &mut Taker<'_>, base: &str) -> Result<(), Reason> {
    let name = format!("{base}.weight");
    let (weight, largest) = (taker.needed(&name)?, taker.needed(&format!("{base}.SCB"))?);
    // Always row-major in checkpoints.
    taker.take(&format!("{base}.weight_format"));
    check(&name, &weight, SIGNED, &[0, 0])?;
    check(&format!("{base}.SCB"), &largest, FLOATS, &[weight.shape[0]])?;
    taker.put(name, weight.shape.clone(), Packed::Bnb8 { weight, largest });
    Ok(())
}

/// The columns per group and the groups per row of `inputs` columns.
fn group_of(base: &str, group: Option<usize>, inputs: usize) -> Result<(usize, usize), Reason> {
    let group = group.unwrap_or(inputs).min(inputs.max(1));
    if inputs == 0 {
        return Err(format!("{base} has no inputs"));
    }
    Ok((group, inputs.div_ceil(group)))
}

fn gptq(taker: &mut Taker<'_>, base: &str, bits: usize, group: Option<usize>, zero_offset: u8) -> Result<(), Reason> {
    let at = |part: &str| format!("{base}.{part}");
    let (codes, zeros, scales) =
        (taker.needed(&at("qweight"))?, taker.needed(&at("qzeros"))?, taker.needed(&at("scales"))?);
    let groups = taker.take(&at("g_idx"));
    check(&at("qweight"), &codes, WORDS, &[0, 0])?;
    let (inputs, outputs) = (codes.shape[0] * 32 / bits, codes.shape[1]);
    let (group, count) = group_of(base, group, inputs)?;
    check(&at("scales"), &scales, FLOATS, &[count, outputs])?;
    check(&at("qzeros"), &zeros, WORDS, &[count, (outputs * bits).div_ceil(32)])?;
    if let Some(groups) = &groups {
        check(&at("g_idx"), groups, WORDS, &[inputs])?;
    }
    taker.put(
        at("weight"),
        vec![outputs, inputs],
        Packed::Gptq { codes, zeros, scales, groups, bits, group, zero_offset },
    );
    Ok(())
}

fn awq(taker: &mut Taker<'_>, base: &str, group: Option<usize>) -> Result<(), Reason> {
    let at = |part: &str| format!("{base}.{part}");
    let (codes, scales, zeros) =
        (taker.needed(&at("qweight"))?, taker.needed(&at("scales"))?, taker.take(&at("qzeros")));
    check(&at("qweight"), &codes, WORDS, &[0, 0])?;
    let (inputs, words) = (codes.shape[0], codes.shape[1]);
    let (group, count) = group_of(base, group, inputs)?;
    check(&at("scales"), &scales, FLOATS, &[count, words * 8])?;
    if let Some(zeros) = &zeros {
        check(&at("qzeros"), zeros, WORDS, &[count, words])?;
    }
    taker.put(at("weight"), vec![words * 8, inputs], Packed::Awq { codes, zeros, scales, group });
    Ok(())
}

fn scaled(
    taker: &mut Taker<'_>,
    base: &str,
    scale: &str,
    is_float: bool,
    block: Option<[usize; 2]>,
    group: Option<usize>,
) -> Result<(), Reason> {
    let name = format!("{base}.weight");
    let (weight, scales) = (taker.needed(&name)?, taker.needed(scale)?);
    check(&name, &weight, if is_float { EIGHTH } else { SIGNED }, &[0, 0])?;
    let (rows, columns) = (weight.shape[0], weight.shape[1]);
    if rows == 0 || columns == 0 {
        return Err(format!("{name} has shape {:?}", weight.shape));
    }
    let count: usize = scales.shape.iter().product();
    let block = match (block, group) {
        (Some(block), _) => block,
        (None, Some(group)) => [1, group],
        // One scale for the matrix, or one per row.
        (None, None) if count == 1 => [rows, columns],
        (None, None) => [1, columns],
    };
    let wanted = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
    if count != wanted[0] * wanted[1] {
        return Err(format!("{scale} has shape {:?} instead of {wanted:?}", scales.shape));
    }
    check(scale, &scales, FLOATS, &scales.shape)?;
    let coding = if is_float { Coding::E4m3 } else { Coding::Signed };
    taker.put(name, vec![rows, columns], Packed::Scaled { weight, scales, coding, block });
    Ok(())
}

fn compressed(
    taker: &mut Taker<'_>,
    base: &str,
    bits: usize,
    group: Option<usize>,
    has_zeros: bool,
) -> Result<(), Reason> {
    let at = |part: &str| format!("{base}.{part}");
    let (codes, scales) = (taker.needed(&at("weight_packed"))?, taker.needed(&at("weight_scale"))?);
    let zeros = taker.take(&at("weight_zero_point")).filter(|_| has_zeros);
    let groups = taker.take(&at("weight_g_idx"));
    taker.take(&at("weight_shape"));
    check(&at("weight_packed"), &codes, WORDS, &[0, 0])?;
    check(&at("weight_scale"), &scales, FLOATS, &[0, 0])?;
    let outputs = codes.shape[0];
    // Rows fill whole words.
    let inputs = codes.shape[1] * 32 / bits;
    let (group, count) = group_of(base, group, inputs)?;
    check(&at("weight_scale"), &scales, FLOATS, &[outputs, count])?;
    if has_zeros && zeros.is_none() {
        return Err(format!("{} is missing", at("weight_zero_point")));
    }
    if let Some(zeros) = &zeros {
        check(&at("weight_zero_point"), zeros, WORDS, &[(outputs * bits).div_ceil(32), count])?;
    }
    if let Some(groups) = &groups {
        check(&at("weight_g_idx"), groups, WORDS, &[inputs])?;
    }
    taker.put(at("weight"), vec![outputs, inputs], Packed::Compressed { codes, zeros, scales, groups, bits, group });
    Ok(())
}

fn mxfp4(taker: &mut Taker<'_>, base: &str) -> Result<(), Reason> {
    let at = |part: &str| format!("{base}_{part}");
    let (blocks, exponents) = (taker.needed(&at("blocks"))?, taker.needed(&at("scales"))?);
    let mut shape = exponents.shape.clone();
    check(&at("scales"), &exponents, BYTES, &shape)?;
    check(&at("blocks"), &blocks, BYTES, &[&shape[..], &[16]].concat())?;
    match shape.last_mut() {
        Some(columns) => *columns *= 32,
        None => return Err(format!("{} has no shape", at("scales"))),
    }
    taker.put(base.to_string(), shape, Packed::Mxfp4 { blocks, exponents });
    Ok(())
}

impl TensorFiles {
    /// Unpacks a matrix.
    ///
    /// # Errors
    /// If the file system fails, or a group index is out of range.
    pub(crate) fn unpack(&self, packed: &Packed, dims: [usize; 2]) -> Result<CodedMatrix, WeightsError> {
        let groups = |tensor: &Option<StoredTensor>, count: usize| match tensor {
            None => Ok(None),
            Some(tensor) => {
                let bytes = self.raw(tensor)?;
                let groups: Vec<u32> =
                    bytes.chunks_exact(4).map(|x| u32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
                // -1 everywhere means contiguous groups.
                if groups.iter().all(|group| *group == u32::MAX) {
                    return Ok(None);
                }
                match groups.iter().find(|group| **group as usize >= count) {
                    None => Ok(Some(groups)),
                    Some(group) => Err(self.wrong(format!("an input has group {group} of {count}"))),
                }
            }
        };
        let optional = |tensor: &Option<StoredTensor>| tensor.as_ref().map(|tensor| self.raw(tensor)).transpose();
        Ok(match packed {
            Packed::Bnb4 { weight, scales, table, block, nested } => {
                let (weight, raw) = (self.raw(weight)?, self.raw(scales)?);
                let (own, entries, offset, size);
                let scales = match nested {
                    None => {
                        own = self.floats(scales)?;
                        Bnb4Scales::Floats(&own)
                    }
                    Some(nested) => {
                        (own, entries) = (self.floats(&nested.scales)?, self.floats(&nested.table)?);
                        (offset, size) = (nested.offset, nested.size);
                        Bnb4Scales::Nested { codes: &raw, table: &entries, scales: &own, size, offset }
                    }
                };
                Bnb4 { dims, weight: &weight, table: *table, block: *block, scales }.unpack()
            }
            Packed::Bnb8 { weight, largest } => packed::int8(dims, &self.raw(weight)?, &self.floats(largest)?),
            Packed::Gptq { codes, zeros, scales, groups: of, bits, group, zero_offset } => {
                let (qweight, qzeros, scales) = (self.raw(codes)?, self.raw(zeros)?, self.floats(scales)?);
                let groups = groups(of, scales.len() / dims[0])?;
                let parts = Gptq {
                    dims,
                    bits: *bits,
                    group: *group,
                    qweight: &qweight,
                    qzeros: &qzeros,
                    zero_offset: *zero_offset,
                    scales: &scales,
                    groups: groups.as_deref(),
                };
                parts.unpack()
            }
            Packed::Awq { codes, zeros, scales, group } => {
                let (qweight, qzeros, scales) = (self.raw(codes)?, optional(zeros)?, self.floats(scales)?);
                Awq { dims, group: *group, qweight: &qweight, qzeros: qzeros.as_deref(), scales: &scales }.unpack()
            }
            Packed::Scaled { weight, scales, coding, block } => {
                packed::scaled_blocks(dims, *coding, &self.raw(weight)?, *block, &self.floats(scales)?)
            }
            Packed::Compressed { codes, zeros, scales, groups: of, bits, group } => {
                let (packed, zeros, scales) = (self.raw(codes)?, optional(zeros)?, self.floats(scales)?);
                let groups = groups(of, scales.len() / dims[0])?;
                let parts = Compressed {
                    dims,
                    bits: *bits,
                    group: *group,
                    packed: &packed,
                    scales: &scales,
                    zeros: zeros.as_deref(),
                    groups: groups.as_deref(),
                };
                parts.unpack()
            }
            Packed::Mxfp4 { blocks, exponents } => packed::mxfp4(dims, &self.raw(blocks)?, &self.raw(exponents)?),
        })
    }
}
