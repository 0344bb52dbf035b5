//! A file of tokens.
//!
//! ```text
//!   0 ..   8   FCTOKENS
//!   8 ..  12   version, 1
//!  12 ..  16   bytes a token, 2 or 4
//!  16 ..  24   tokens
//!  24 ..  56   sha256 of the tokenizer
//!  56 ..  60   CRC-32 of the tokens
//!  60 ..  64   0
//!  64 ..       tokens, the least significant byte first, as all numbers above
//! ```

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::manifest::{Manifest, ShardEntry, modified};
use crate::error::DataError;

const MAGIC: &[u8; 8] = b"FCTOKENS";
const VERSION: u32 = 1;
const HEADER: usize = 64;

/// A file of tokens, open.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    file: File,
    tokens: u64,
    width: usize,
    vocab_size: u32,
}

impl Shard {
    /// Opens a shard and checks it against the manifest.
    pub(super) fn open(folder: &Path, entry: &ShardEntry, manifest: &Manifest) -> Result<Self, DataError> {
        let path = folder.join(&entry.file);
        let refused = |error| DataError::Io { path: path.clone(), error };
        let mut file = File::open(&path).map_err(refused)?;
        let mut header = [0; HEADER];
        let size = file.metadata().map_err(refused)?.len();
        let wanted = HEADER as u64 + entry.tokens * manifest.width as u64;
        if size != wanted {
            return Err(damaged(&path, &format!("it has {size} bytes instead of {wanted}")));
        }
        file.read_exact(&mut header).map_err(refused)?;
        if header != written_header(manifest, entry.tokens, entry.crc32)? {
            return Err(damaged(&path, "its header does not match tokens.json"));
        }
        if modified(&path) != entry.modified {
            let mut hash = crc32fast::Hasher::new();
            let mut bytes = vec![0; 1 << 20];
            loop {
                match file.read(&mut bytes).map_err(refused)? {
                    0 => break,
                    count => hash.update(&bytes[..count]),
                }
            }
            let found = hash.finalize();
            if found != entry.crc32 {
                return Err(damaged(&path, &format!("its checksum is {found:08x} instead of {:08x}", entry.crc32)));
            }
        }
        let vocab_size = manifest.vocab_size as u32;
        Ok(Self { path, file, tokens: entry.tokens, width: manifest.width, vocab_size })
    }

    /// Tokens in it.
    pub(super) fn len(&self) -> u64 {
        self.tokens
    }

    /// Appends `count` tokens from `begin` on to `tokens`.
    pub(super) fn read(&self, begin: u64, count: usize, tokens: &mut Vec<u32>) -> Result<(), DataError> {
        let mut bytes = vec![0; count * self.width];
        let place = HEADER as u64 + begin * self.width as u64;
        read_exact_at(&self.file, &mut bytes, place).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => damaged(&self.path, "it was truncated while it was read"),
            _ => DataError::Io { path: self.path.clone(), error },
        })?;
        let first = tokens.len();
        match self.width {
            2 => tokens.extend(bytes.chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]])))),
            _ => tokens.extend(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        }
        match tokens[first..].iter().find(|token| **token >= self.vocab_size) {
            Some(token) => Err(damaged(&self.path, &format!("token {token} is not in its tokenizer"))),
            None => Ok(()),
        }
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, bytes: &mut [u8], place: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, place)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut bytes: &mut [u8], mut place: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, place)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                bytes = &mut bytes[count..];
                place += count as u64;
            }
        }
    }
    Ok(())
}

fn damaged(path: &Path, reason: &str) -> DataError {
    let folder = path.parent().unwrap_or(path).display();
    let reason = format!("is damaged: {reason}; remove {folder} and tokenize again");
    DataError::Refused { path: path.to_path_buf(), reason }
}

fn written_header(manifest: &Manifest, tokens: u64, crc32: u32) -> Result<[u8; HEADER], DataError> {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&(manifest.width as u32).to_le_bytes());
    header[16..24].copy_from_slice(&tokens.to_le_bytes());
    let hash = &manifest.tokenizer_sha256;
    for (at, byte) in header[24..56].iter_mut().enumerate() {
        let digits = hash.get(2 * at..2 * at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        *byte = digits.ok_or_else(|| DataError::Tokenizer(format!("tokens.json: {hash} is not a sha256")))?;
    }
    header[56..60].copy_from_slice(&crc32.to_le_bytes());
    Ok(header)
}

/// A shard being written, under a temporary name.
pub(super) struct ShardWriter {
    name: String,
    partial: PathBuf,
    place: PathBuf,
    file: BufWriter<File>,
    hash: crc32fast::Hasher,
    tokens: u64,
    width: usize,
}

impl ShardWriter {
    /// Starts the shard `name` of a folder.
    pub(super) fn new(folder: &Path, name: String, width: usize) -> Result<Self, DataError> {
        let (place, partial) = (folder.join(&name), folder.join(format!("{name}.partial")));
        let file = File::create(&partial).and_then(|mut file| {
            file.write_all(&[0; HEADER])?;
            Ok(BufWriter::with_capacity(1 << 20, file))
        });
        let file = file.map_err(|error| DataError::Io { path: partial.clone(), error })?;
        Ok(Self { name, partial, place, file, hash: crc32fast::Hasher::new(), tokens: 0, width })
    }

    /// Tokens written.
    pub(super) fn len(&self) -> u64 {
        self.tokens
    }

    /// Writes more tokens.
    pub(super) fn write(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        let bytes: Vec<u8> = match self.width {
            2 => tokens.iter().flat_map(|token| (*token as u16).to_le_bytes()).collect(),
            _ => tokens.iter().flat_map(|token| token.to_le_bytes()).collect(),
        };
        self.hash.update(&bytes);
        self.tokens += tokens.len() as u64;
        self.file.write_all(&bytes).map_err(|error| DataError::Io { path: self.partial.clone(), error })
    }

    /// Renames the complete shard to its name.
    pub(super) fn finish(self, manifest: &Manifest) -> Result<ShardEntry, DataError> {
        let Self { name, partial, place, mut file, hash, tokens, .. } = self;
        let crc32 = hash.finalize();
        let header = written_header(manifest, tokens, crc32)?;
        let mut put = || {
            file.flush()?;
            let file = file.get_mut();
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&header)?;
            file.sync_all()?;
            fs::rename(&partial, &place)
        };
        put().map_err(|error| DataError::Io { path: place.clone(), error })?;
        Ok(ShardEntry { file: name, tokens, crc32, modified: modified(&place) })
    }
}
