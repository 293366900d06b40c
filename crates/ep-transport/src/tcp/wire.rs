//! What the control plane's connections carry.
//!
//! A frame is a 16-byte header (magic, version, two zero bytes, length of the head, length of the
//! body; integers are little-endian), a head that is a [`Message`] in postcard's encoding, and a
//! body of raw bytes. Everything is checked before it is believed: the first wrong byte of the
//! header ends a connection, and no length is allocated before the bytes are there.

use std::io::{self, Read};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The version of this protocol; ranks of different versions cannot form a group.
pub(crate) const VERSION: u16 = 1;
const MAGIC: [u8; 4] = *b"EPCP";
const HEADER: usize = 16;
/// The largest head: the lists of ranks and operations of a large world fit.
const MAX_HEAD: usize = 1 << 20;
/// The most bytes one all-gather may carry, all ranks together.
pub(crate) const MAX_BODY: usize = 64 << 20;
/// What a connection may send before it has said who it is.
pub(crate) const MAX_HELLO: usize = 4096;
/// Texts in messages are cut to this many bytes.
const MAX_TEXT: usize = 4096;

/// Names a group: empty for the world, two numbers more for each split (the split's number within
/// its parent, and the subgroup's first member).
pub(crate) type GroupId = Vec<u32>;

/// Why an all-gather gave no result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Failure {
    /// These ranks of the group had not come by the caller's deadline.
    Absent(Vec<u32>),
    /// This rank of the group has left and will not come.
    Left(u32),
    /// The ranks called different operations; by rank.
    Operations(Vec<String>),
    /// The ranks are at different places in the group's sequence; by rank.
    Sequences(Vec<u64>),
    /// The ranks' bytes together are too many.
    TooLarge(u64),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    // From a rank to the hub.
    /// The first message. The body is the job's token.
    Hello { rank: u32, world: u32, wait_ms: u64 },
    /// The sender is part of a new group of these ranks of the world.
    Open { group: GroupId, members: Vec<u32> },
    /// The sender's part of an all-gather; the bytes are the body.
    Gather { group: GroupId, seq: u64, wait_ms: u64, op: String },
    /// The sender gives up for the group, blaming a rank of it.
    Abort { group: GroupId, blames: Option<u32>, why: String },
    /// The sender has no more use for the group.
    Leave { group: GroupId, panicked: bool },
    /// The sender has left all its groups and will close the connection.
    Bye,

    // From the hub to a rank.
    /// The hello was right; the verdict comes when all ranks are here.
    Heard,
    /// All ranks are here.
    Welcome,
    /// There will be no group.
    Refused { peer: Option<u32>, detail: String },
    /// The result of an all-gather: the lengths by rank; the bytes are the body.
    Gathered { group: GroupId, seq: u64, lens: Vec<u32> },
    /// An all-gather has failed.
    Failed { group: GroupId, seq: u64, failure: Failure },
    /// A rank of the group gave up.
    Fault { group: GroupId, by: u32, blames: Option<u32>, why: String },
    /// A rank of the group left it.
    Left { group: GroupId, rank: u32, panicked: bool },
    /// A rank of the world is dead.
    Lost { rank: u32, detail: String },
    /// The rank that runs the hub is done: the connection may close at any time.
    Farewell,
    /// The answer to `Bye`.
    ByeAck,
}

/// A message and its raw bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) message: Message,
    pub(crate) body: Vec<u8>,
}

impl From<Message> for Frame {
    fn from(message: Message) -> Self {
        Self { message, body: Vec::new() }
    }
}

/// `text`, cut to what a message may carry.
pub(crate) fn text(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// The bytes of a frame, ready to be sent to many.
pub(crate) fn encode(message: &Message, body: &[u8]) -> Arc<[u8]> {
    encode_parts(message, &[body])
}

/// [`encode`] with a body in pieces.
pub(crate) fn encode_parts(message: &Message, body: &[impl AsRef<[u8]>]) -> Arc<[u8]> {
    let head = postcard::to_stdvec(message).expect("a message of owned values has an encoding");
    let body_len: usize = body.iter().map(|part| part.as_ref().len()).sum();
    let mut bytes = Vec::with_capacity(HEADER + head.len() + body_len);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[0, 0]);
    for len in [head.len(), body_len] {
        bytes.extend_from_slice(&u32::try_from(len).expect("checked by callers").to_le_bytes());
    }
    bytes.extend_from_slice(&head);
    for part in body {
        bytes.extend_from_slice(part.as_ref());
    }
    bytes.into()
}

/// Cuts a stream of bytes into frames.
#[derive(Debug)]
pub(crate) struct Decoder {
    buffer: Vec<u8>,
    /// The most bytes of head and body together.
    limit: usize,
}

impl Decoder {
    pub(crate) fn new(limit: usize) -> Self {
        Self { buffer: Vec::new(), limit }
    }

    /// Allows frames of any size the protocol knows.
    pub(crate) fn trust(&mut self) {
        self.limit = MAX_HEAD + MAX_BODY;
    }

    /// Reads once, at most `chunk` bytes. 0 is the end of the stream.
    pub(crate) fn read(&mut self, from: &mut impl Read, chunk: usize) -> io::Result<usize> {
        let filled = self.buffer.len();
        self.buffer.resize(filled + chunk, 0);
        let read = from.read(&mut self.buffer[filled..]);
        self.buffer.truncate(filled + *read.as_ref().unwrap_or(&0));
        read
    }

    /// Whether a frame has begun and not ended.
    pub(crate) fn midway(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// The next frame, if it is complete.
    ///
    /// # Errors
    /// What is wrong with the stream; it cannot be read any further.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, String> {
        let Some((head, body)) = self.lengths()? else { return Ok(None) };
        let end = HEADER + head + body;
        if self.buffer.len() < end {
            return Ok(None);
        }
        let (message, rest) =
            postcard::take_from_bytes::<Message>(&self.buffer[HEADER..HEADER + head])
                .map_err(|e| format!("it sent a message that cannot be read ({e})"))?;
        if !rest.is_empty() {
            return Err("it sent a message with trailing bytes".into());
        }
        let body = self.buffer[HEADER + head..end].to_vec();
        self.buffer.drain(..end);
        Ok(Some(Frame { message, body }))
    }

    fn lengths(&self) -> Result<Option<(usize, usize)>, String> {
        let seen = self.buffer.len().min(MAGIC.len());
        if self.buffer[..seen] != MAGIC[..seen] {
            return Err("it does not speak this protocol".into());
        }
        if self.buffer.len() < HEADER {
            return Ok(None);
        }
        let version = u16::from_le_bytes([self.buffer[4], self.buffer[5]]);
        if version != VERSION {
            return Err(format!("it speaks version {version} of the protocol, not {VERSION}"));
        }
        let word = |at: usize| {
            let bytes = self.buffer[at..at + 4].try_into().expect("four bytes");
            u32::from_le_bytes(bytes) as usize
        };
        let (head, body) = (word(8), word(12));
        if head > MAX_HEAD || body > MAX_BODY || head + body > self.limit {
            return Err(format!("it sent a frame of {head} + {body} bytes, which is oversized"));
        }
        Ok(Some((head, body)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode_all(bytes: &[u8], chunk: usize) -> Result<Vec<Frame>, String> {
        let (mut decoder, mut frames, mut from) = (Decoder::new(MAX_HELLO), Vec::new(), bytes);
        while decoder.read(&mut from, chunk).expect("reading a slice") > 0 {
            while let Some(frame) = decoder.next()? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    fn gather(op: &str, body: &[u8]) -> (Message, Vec<u8>) {
        let op = op.to_owned();
        (Message::Gather { group: vec![1, 2], seq: 7, wait_ms: 9, op }, body.to_vec())
    }

    #[test]
    fn wrong_magic_is_seen_at_the_first_byte() {
        assert!(decode_all(b"G", 1).unwrap_err().contains("does not speak"));
    }

    #[test]
    fn other_versions_are_named() {
        let mut bytes = encode(&Message::Bye, &[]).to_vec();
        bytes[4] = 9;
        let error = decode_all(&bytes, 64).unwrap_err();
        assert!(error.contains("version 9"), "{error}");
    }

    #[test]
    fn oversized_frames_are_refused_from_the_header() {
        let bytes = encode(&Message::Bye, &vec![0; MAX_HELLO + 1]);
        assert!(decode_all(&bytes[..HEADER], 64).unwrap_err().contains("oversized"));
    }

    #[test]
    fn texts_are_cut_at_a_character() {
        let long = "ä".repeat(MAX_TEXT);
        assert_eq!(text(&long).len(), MAX_TEXT);
        assert_eq!(text(&format!("a{long}")).len(), MAX_TEXT - 1);
    }

    proptest! {
        #[test]
        fn frames_survive_any_fragmentation(
            ops in prop::collection::vec((".{0,20}", prop::collection::vec(any::<u8>(), 0..200)), 0..6),
            chunk in 1usize..300,
        ) {
            let sent: Vec<_> = ops.iter().map(|(op, body)| gather(op, body)).collect();
            let bytes: Vec<u8> = sent.iter().flat_map(|(m, b)| encode(m, b).to_vec()).collect();
            let got = decode_all(&bytes, chunk).unwrap();
            let got: Vec<_> = got.into_iter().map(|f| (f.message, f.body)).collect();
            prop_assert_eq!(got, sent);
        }

        #[test]
        fn damage_never_panics(at in 0usize..60, with in any::<u8>(), cut in 0usize..80) {
            let mut bytes = encode(&gather("all_gather", &[3; 20]).0, &[3; 20]).to_vec();
            let at = at % bytes.len();
            bytes[at] = with;
            bytes.truncate(cut.max(1));
            // Any verdict will do.
            let _ = decode_all(&bytes, 7);
        }
    }
}
