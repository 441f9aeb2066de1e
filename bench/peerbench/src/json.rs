//! A small JSON reader (bodies here are trusted and small) and a string escaper.

#[derive(Debug, Clone)]
pub enum Json {
    Null,
    Bool(bool),
    Num(f64),
    Str(String),
    Arr(Vec<Json>),
    Obj(Vec<(String, Json)>),
}

impl Json {
    pub fn get(&self, k: &str) -> Option<&Json> {
        match self {
            Json::Obj(v) => v.iter().find(|(n, _)| n == k).map(|(_, x)| x),
            _ => None,
        }
    }
    pub fn str(&self) -> Option<&str> {
        if let Json::Str(s) = self {
            Some(s)
        } else {
            None
        }
    }
    pub fn num(&self) -> Option<f64> {
        if let Json::Num(n) = self {
            Some(*n)
        } else {
            None
        }
    }
    pub fn is_true(&self) -> bool {
        matches!(self, Json::Bool(true))
    }
    pub fn arr(&self) -> &[Json] {
        if let Json::Arr(v) = self {
            v
        } else {
            &[]
        }
    }
}

struct Parser<'a> {
    b: &'a [u8],
    i: usize,
}

/// Read one JSON value that fills `b`; None if it is none.
pub fn parse(b: &[u8]) -> Option<Json> {
    let mut p = Parser { b, i: 0 };
    let v = p.value(0)?;
    p.skip_space();
    if p.i == b.len() {
        Some(v)
    } else {
        None
    }
}

impl<'a> Parser<'a> {
    fn skip_space(&mut self) {
        while self.i < self.b.len() && matches!(self.b[self.i], b' ' | b'\t' | b'\n' | b'\r') {
            self.i += 1;
        }
    }
    fn peek(&mut self) -> Option<u8> {
        self.skip_space();
        self.b.get(self.i).copied()
    }
    fn literal(&mut self, s: &str, v: Json) -> Option<Json> {
        if self.b[self.i..].starts_with(s.as_bytes()) {
            self.i += s.len();
            Some(v)
        } else {
            None
        }
    }
    fn value(&mut self, depth: usize) -> Option<Json> {
        if depth > 64 {
            return None;
        }
        match self.peek()? {
            b'n' => self.literal("null", Json::Null),
            b't' => self.literal("true", Json::Bool(true)),
            b'f' => self.literal("false", Json::Bool(false)),
            b'"' => Some(Json::Str(self.string()?)),
            b'[' => {
                self.i += 1;
                let mut v = Vec::new();
                if self.peek()? == b']' {
                    self.i += 1;
                    return Some(Json::Arr(v));
                }
                loop {
                    v.push(self.value(depth + 1)?);
                    match self.peek()? {
                        b',' => self.i += 1,
                        b']' => {
                            self.i += 1;
                            return Some(Json::Arr(v));
                        }
                        _ => return None,
                    }
                }
            }
            b'{' => {
                self.i += 1;
                let mut v = Vec::new();
                if self.peek()? == b'}' {
                    self.i += 1;
                    return Some(Json::Obj(v));
                }
                loop {
                    if self.peek()? != b'"' {
                        return None;
                    }
                    let k = self.string()?;
                    if self.peek()? != b':' {
                        return None;
                    }
                    self.i += 1;
                    let x = self.value(depth + 1)?;
                    v.push((k, x));
                    match self.peek()? {
                        b',' => self.i += 1,
                        b'}' => {
                            self.i += 1;
                            return Some(Json::Obj(v));
                        }
                        _ => return None,
                    }
                }
            }
            _ => {
                let s = self.i;
                while self.i < self.b.len()
                    && matches!(self.b[self.i], b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9')
                {
                    self.i += 1;
                }
                std::str::from_utf8(&self.b[s..self.i]).ok()?.parse().ok().map(Json::Num)
            }
        }
    }
    fn hex4(&mut self) -> Option<u32> {
        let h = self.b.get(self.i..self.i + 4)?;
        self.i += 4;
        u32::from_str_radix(std::str::from_utf8(h).ok()?, 16).ok()
    }
    fn string(&mut self) -> Option<String> {
        self.i += 1;
        let mut out: Vec<u8> = Vec::new();
        loop {
            let s = self.i;
            while !matches!(*self.b.get(self.i)?, b'"' | b'\\') {
                self.i += 1;
            }
            out.extend_from_slice(&self.b[s..self.i]);
            let c = self.b[self.i];
            self.i += 1;
            if c == b'"' {
                return String::from_utf8(out).ok();
            }
            let e = *self.b.get(self.i)?;
            self.i += 1;
            match e {
                b'n' => out.push(b'\n'),
                b't' => out.push(b'\t'),
                b'r' => out.push(b'\r'),
                b'b' => out.push(8),
                b'f' => out.push(12),
                b'u' => {
                    let mut c = self.hex4()?;
                    if (0xd800..0xdc00).contains(&c) && self.b[self.i..].starts_with(b"\\u") {
                        self.i += 2;
                        let lo = self.hex4()?;
                        c = 0x10000 + ((c - 0xd800) << 10) + (lo.wrapping_sub(0xdc00) & 0x3ff);
                    }
                    let ch = char::from_u32(c).unwrap_or('\u{fffd}');
                    let mut t = [0u8; 4];
                    out.extend_from_slice(ch.encode_utf8(&mut t).as_bytes());
                }
                o => out.push(o),
            }
        }
    }
}

/// `s` as a JSON string, quotes included.
pub fn esc(s: &str) -> String {
    let mut o = String::with_capacity(s.len() + 2);
    o.push('"');
    for c in s.chars() {
        match c {
            '"' => o.push_str("\\\""),
            '\\' => o.push_str("\\\\"),
            '\n' => o.push_str("\\n"),
            c if (c as u32) < 0x20 => o.push_str(&format!("\\u{:04x}", c as u32)),
            c => o.push(c),
        }
    }
    o.push('"');
    o
}
