/* The inner loops of the gateway: reads events of the usual shape into columns, tells events that nobody acts on, and
   unwraps HTTP's chunks.

   `usual.py` has the same in Python and says what it is for. A delta that brings more than words goes to Python as it
   came, and is read there. This takes an event only where every byte of it is as
   expected, and leaves all others to Python: whatever is odd ends the loop, nothing of that event is kept. Nothing is
   read beyond the end of the bytes at hand; depth, alternatives and texts are bounded. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_TOPS 32
#define MOST_DEPTH 16

typedef struct { const char *at, *end; int escaped; } Text;
typedef struct { const char *at, *end; } Reader;
typedef struct { const char *at; size_t size; } Name;
#define NAME(w) {w, sizeof(w) - 1}
typedef struct {
  Text token, content, delta, id;
  double logprob;
  int tops, plain, has_content;
  Text top_token[MOST_TOPS];
  double top_logprob[MOST_TOPS];
} Event;

/* ---- JSON: each returns 1, or 0 where it is not what it should be ---- */

static inline int byte(Reader *r, char c) { return r->at < r->end && *r->at == c ? (r->at++, 1) : 0; }

static inline int word(Reader *r, const char *w, size_t n) {
  if ((size_t)(r->end - r->at) < n || memcmp(r->at, w, n)) return 0;
  r->at += n;
  return 1;
}
#define WORD(r, w) word(r, w, sizeof(w) - 1)

static inline void space(Reader *r) { while (r->at < r->end && *r->at == ' ') r->at++; }

static int text(Reader *r, Text *t) {
  if (!byte(r, '"')) return 0;
  t->at = r->at;
  t->escaped = 0;
  for (; r->at < r->end; r->at++) {
    unsigned char c = (unsigned char)*r->at;
    if (c == '"') { t->end = r->at++; return 1; }
    if (c < 0x20) return 0;
    if (c == '\\') {
      t->escaped = 1;
      if (++r->at == r->end || !strchr("\"\\/bfnrtu", *r->at) || !*r->at) return 0;
      if (*r->at == 'u') {
        if (r->end - r->at < 5) return 0;
        for (int i = 1; i <= 4; i++) {
          unsigned char h = (unsigned char)r->at[i] | 0x20;
          if (!((r->at[i] >= '0' && r->at[i] <= '9') || (h >= 'a' && h <= 'f'))) return 0;
        }
        r->at += 4;
      }
    }
  }
  return 0;
}

/* A text of which nothing is kept: where nobody reads it again, only such as any reader takes. */
static int skip_text(Reader *r, int again) {
  Text t;
  if (!text(r, &t)) return 0;
  if (!again)
    for (const char *c = t.at; c < t.end; c++)
      if ((unsigned char)*c >= 0x80) return 0;
  return 1;
}

static int digits(Reader *r) {
  const char *from = r->at;
  while (r->at < r->end && *r->at >= '0' && *r->at <= '9') r->at++;
  return (int)(r->at - from);
}

/* By the grammar; where its parts are. */
static int number(Reader *r, int *whole) {
  byte(r, '-');
  const char *from = r->at;
  int n = digits(r);
  *whole = 1;
  if (!n || (n > 1 && *from == '0')) return 0;
  if (byte(r, '.')) { *whole = 0; if (!digits(r)) return 0; }
  if (r->at < r->end && (*r->at == 'e' || *r->at == 'E')) {
    *whole = 0;
    r->at++;
    if (r->at < r->end && (*r->at == '+' || *r->at == '-')) r->at++;
    if (!digits(r)) return 0;
  }
  return 1;
}

/* An id as it is spelled: no sign, and no more digits than 64 bits have. */
static int id(Reader *r, Text *t) {
  int whole;
  *t = (Text){r->at, r->at, 0};
  if (r->at == r->end || *r->at == '-' || !number(r, &whole) || !whole || r->at - t->at > 18) return 0;
  t->end = r->at;
  return 1;
}

/* The double nearest to m / 10^k, ties to even; 0 < m, k <= 19. Exact: the quotient has 55 bits or more, and what is
   left over counts in the last place. */
#ifdef __SIZEOF_INT128__
static double divided(uint64_t m, int k) {
  static const uint64_t tens[20] = {1ull, 10ull, 100ull, 1000ull, 10000ull, 100000ull, 1000000ull, 10000000ull,
    100000000ull, 1000000000ull, 10000000000ull, 100000000000ull, 1000000000000ull, 10000000000000ull,
    100000000000000ull, 1000000000000000ull, 10000000000000000ull, 100000000000000000ull, 1000000000000000000ull,
    10000000000000000000ull};
  int shift = __builtin_clzll(m) + 60;
  unsigned __int128 n = (unsigned __int128)m << shift, q = n / tens[k];
  if (q * tens[k] != n) q |= 1;
  uint64_t high = (uint64_t)(q >> 64);
  int bits = high ? 128 - __builtin_clzll(high) : 64 - __builtin_clzll((uint64_t)q);
  int drop = bits - 55; /* two bits beyond a double's 53: half and what sticks */
  if (drop > 0) {
    int sticks = (q & (((unsigned __int128)1 << drop) - 1)) != 0;
    q = (q >> drop) | sticks;
  } else drop = 0;
  uint64_t v = (uint64_t)q;
  int low = (int)(v & 3);
  v >>= 2;
  v += low == 3 || (low == 2 && (v & 1));
  double d = (double)v;
  for (int e = drop + 2 - shift; e; ) { /* powers of two are exact; the result is far from the smallest doubles */
    int s = e < -60 ? -60 : e > 60 ? 60 : e;
    d = s < 0 ? d / (double)(1ull << -s) : d * (double)(1ull << s);
    e -= s;
  }
  return d;
}
#endif

static int real(Reader *r, double *value) {
  const char *from = r->at;
  int whole;
  if (!number(r, &whole)) return 0;
  size_t n = (size_t)(r->at - from);
#ifdef __SIZEOF_INT128__
  int minus = *from == '-', seen = 0, after = 0, point = 0;
  uint64_t m = 0;
  const char *c = from + minus;
  for (; c < r->at && *c != 'e' && *c != 'E' && seen <= 19; c++) {
    if (*c == '.') { point = 1; continue; }
    seen += m || *c != '0';
    after += point;
    if (seen <= 19) m = m * 10 + (uint64_t)(*c - '0');
  }
  if (c == r->at && seen <= 19 && after <= 19 && m) {
    double d = divided(m, after);
    *value = minus ? -d : d;
    return 1;
  }
#endif
  char copy[64];
  if (n >= sizeof copy) return 0;
  memcpy(copy, from, n);
  copy[n] = 0;
  *value = PyOS_string_to_double(copy, NULL, NULL);
  if (*value == -1.0 && PyErr_Occurred()) { PyErr_Clear(); return 0; }
  return *value < 1e300 && *value > -1e300;
}

static int skip(Reader *r, int depth, int again) {
  int whole;
  if (r->at == r->end || depth > MOST_DEPTH) return 0;
  switch (*r->at) {
    case '"': return skip_text(r, again);
    case 't': return WORD(r, "true");
    case 'f': return WORD(r, "false");
    case 'n': return WORD(r, "null");
    case '[':
      r->at++; space(r);
      if (byte(r, ']')) return 1;
      do { space(r); if (!skip(r, depth + 1, again)) return 0; space(r); } while (byte(r, ','));
      return byte(r, ']');
    case '{':
      r->at++; space(r);
      if (byte(r, '}')) return 1;
      do {
        space(r);
        if (!skip_text(r, again)) return 0;
        space(r);
        if (!byte(r, ':')) return 0;
        space(r);
        if (!skip(r, depth + 1, again)) return 0;
        space(r);
      } while (byte(r, ','));
      return byte(r, '}');
    default: return number(r, &whole);
  }
}

/* ---- the shape: members that are known are taken by `take`, others skipped; none may come twice ---- */

typedef int (*Take)(Reader *r, Event *e, int which);
static int take_delta(Reader *r, Event *e, int which);

static int members(Reader *r, Event *e, const Name *names, Take take, unsigned *seen) {
  *seen = 0;
  if (!byte(r, '{')) return 0;
  space(r);
  if (byte(r, '}')) return 1;
  do {
    Text name;
    int which = 0;
    space(r);
    if (!text(r, &name) || name.escaped) return 0;
    size_t n = (size_t)(name.end - name.at);
    for (size_t i = 0; i < n; i++)
      if ((unsigned char)name.at[i] >= 0x80) return 0;
    while (names[which].at && (names[which].size != n || memcmp(names[which].at, name.at, n))) which++;
    space(r);
    if (!byte(r, ':')) return 0;
    space(r);
    if (names[which].at) {
      if (*seen & 1u << which) return 0;
      *seen |= 1u << which;
      if (!take(r, e, which)) return 0;
    } else if (!skip(r, 0, take == take_delta)) return 0;
    space(r);
  } while (byte(r, ','));
  return byte(r, '}');
}

/* In all lists the members that must be null, where they come at all, stand at the end. */

static const Name TOP[] = {NAME("token"), NAME("logprob"), NAME("id"), {NULL, 0}};
static int take_top(Reader *r, Event *e, int which) {
  if (which == 0) return text(r, &e->top_token[e->tops]);
  return which == 1 ? real(r, &e->top_logprob[e->tops]) : WORD(r, "null");
}

static const Name ENTRY[] = {NAME("token"), NAME("logprob"), NAME("top_logprobs"), NAME("id"), {NULL, 0}};
static int take_entry(Reader *r, Event *e, int which) {
  unsigned seen;
  if (which == 0) return text(r, &e->token);
  if (which == 1) return real(r, &e->logprob);
  if (which == 3) return WORD(r, "null");
  if (WORD(r, "null")) return 1;
  if (!byte(r, '[')) return 0;
  space(r);
  if (byte(r, ']')) return 1;
  do {
    space(r);
    if (e->tops == MOST_TOPS || !members(r, e, TOP, take_top, &seen) || (seen & 3) != 3) return 0;
    e->tops++;
    space(r);
  } while (byte(r, ','));
  return byte(r, ']');
}

static const Name LOGPROBS[] = {NAME("content"), NAME("tokens"), NAME("token_logprobs"), NAME("top_logprobs"), {NULL, 0}};
static int take_logprobs(Reader *r, Event *e, int which) {
  unsigned seen;
  if (which) return WORD(r, "null");
  if (!byte(r, '[')) return 0;
  space(r);
  if (!members(r, e, ENTRY, take_entry, &seen) || (seen & 3) != 3) return 0;
  space(r);
  return byte(r, ']');
}

static const Name DELTA[] = {NAME("content"), {NULL, 0}};
static int take_delta(Reader *r, Event *e, int which) {
  (void)which;
  if (WORD(r, "null")) return 1;
  e->has_content = 1;
  return text(r, &e->content);
}
/* Whether what was skipped of a delta says nothing: no more than `role`, and nulls. */
static int says_nothing(Reader *from, const char *end) {
  Reader r = {from->at + 1, end};
  for (;;) {
    Text name, value;
    space(&r);
    if (byte(&r, '}')) return 1;
    if (!text(&r, &name)) return 0;
    space(&r); byte(&r, ':'); space(&r);
    size_t n = (size_t)(name.end - name.at);
    int known = (n == 7 && !memcmp(name.at, "content", 7)) || (n == 4 && !memcmp(name.at, "role", 4));
    if (!WORD(&r, "null") && !(known && text(&r, &value))) return 0;
    space(&r); byte(&r, ',');
  }
}

static const Name CHOICE[] = {NAME("index"), NAME("delta"), NAME("logprobs"), NAME("token_ids"), NAME("finish_reason"), NAME("text"), NAME("message"),
                                     NAME("response_token_ids"), NAME("prompt_token_ids"), {NULL, 0}};
static int take_choice(Reader *r, Event *e, int which) {
  unsigned seen;
  Text zero;
  Reader from = *r;
  switch (which) {
    case 0: return id(r, &zero) && *zero.at == '0';
    case 1:
      if (!members(r, e, DELTA, take_delta, &seen)) return 0;
      e->plain = says_nothing(&from, r->at);
      e->delta = (Text){from.at, r->at, 0};
      return 1;
    case 2: return members(r, e, LOGPROBS, take_logprobs, &seen) && (seen & 1);
    case 3:
      if (!byte(r, '[')) return 0;
      space(r);
      if (!id(r, &e->id)) return 0;
      space(r);
      return byte(r, ']');
    default: return WORD(r, "null");
  }
}

static const Name CHUNK[] = {NAME("choices"), NAME("usage"), NAME("error"), NAME("prompt_token_ids"), NAME("sglext"), NAME("__verbose"), {NULL, 0}};
static int take_chunk(Reader *r, Event *e, int which) {
  unsigned seen;
  if (which) return WORD(r, "null");
  if (!byte(r, '[')) return 0;
  space(r);
  if (!members(r, e, CHOICE, take_choice, &seen) || (seen & 14) != 14) return 0;
  space(r);
  return byte(r, ']');
}

static int event(Reader *r, Event *e) {
  unsigned seen;
  e->tops = e->plain = e->has_content = 0;
  return WORD(r, "data: ") && members(r, e, CHUNK, take_chunk, &seen) && (seen & 1) && WORD(r, "\n\n");
}

/* ---- columns: what an event says is appended to buffers, in the form in which it is kept ---- */

typedef struct { char *at; size_t size, room; } Buffer;

static int add(Buffer *b, const void *from, size_t n) {
  if (!n) return 1;
  if (b->size + n > b->room) {
    size_t room = 2 * (b->size + n) + 1024;
    char *at = realloc(b->at, room);
    if (!at) return 0;
    b->at = at;
    b->room = room;
  }
  memcpy(b->at + b->size, from, n);
  b->size += n;
  return 1;
}

static int utf8(const char *at, const char *end) {
  const unsigned char *c = (const unsigned char *)at, *stop = (const unsigned char *)end;
  while (c < stop) {
    unsigned first = *c++;
    if (first < 0x80) continue;
    int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    if (first < 0xC2 || first > 0xF4 || stop - c < more) return 0;
    unsigned low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    unsigned high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    if (*c < low || *c > high) return 0;
    for (c++; --more; c++)
      if (*c < 0x80 || *c > 0xBF) return 0;
  }
  return 1;
}

static unsigned hex4(const char *c) {
  unsigned v = 0;
  for (int i = 0; i < 4; i++) {
    unsigned h = (unsigned char)c[i];
    v = v << 4 | (h <= '9' ? h - '0' : (h | 0x20) - 'a' + 10);
  }
  return v;
}

/* Whether it can be kept as it is spelled: characters only, and no halves of pairs. */
static int sound(const Text *t) {
  if (!utf8(t->at, t->end)) return 0;
  if (t->escaped)
    for (const char *c = t->at; c < t->end; c++)
      if (*c == '\\' && *++c == 'u' && (hex4(c + 1) & 0xF800) == 0xD800) return 0;
  return 1;
}

/* What it says, as UTF-8. */
static int add_said(Buffer *b, const Text *t) {
  if (!t->escaped) return add(b, t->at, (size_t)(t->end - t->at));
  for (const char *c = t->at; c < t->end; c++) {
    const char *from = c;
    char out[3];
    size_t n = 1;
    while (c < t->end && *c != '\\') c++;
    if (!add(b, from, (size_t)(c - from))) return 0;
    if (c == t->end) break;
    switch (*++c) {
      case 'b': out[0] = '\b'; break;
      case 'f': out[0] = '\f'; break;
      case 'n': out[0] = '\n'; break;
      case 'r': out[0] = '\r'; break;
      case 't': out[0] = '\t'; break;
      case 'u': {
        unsigned v = hex4(c + 1);
        c += 4;
        if (v < 0x80) out[0] = (char)v;
        else if (v < 0x800) { out[0] = (char)(0xC0 | v >> 6); out[1] = (char)(0x80 | (v & 63)); n = 2; }
        else {
          out[0] = (char)(0xE0 | v >> 12); out[1] = (char)(0x80 | (v >> 6 & 63)); out[2] = (char)(0x80 | (v & 63)); n = 3;
        }
        break;
      }
      default: out[0] = *c;
    }
    if (!add(b, out, n)) return 0;
  }
  return 1;
}

/* Its JSON behind a comma, as the columns have it. */
static int add_text(Buffer *b, const Text *t) {
  return add(b, ",", 1) && add(b, t->at - 1, (size_t)(t->end - t->at) + 2);
}

enum { TEXTS, IDS, LOGPROBS_, COUNTS, TOP_TEXTS, TOP_IDS, TOP_LOGPROBS, COLUMNS, WORDS = COLUMNS, BUFFERS };

static int can_keep(const Event *e) {
  if (e->token.end - e->token.at >= 9 && !memcmp(e->token.at, "token_id:", 9)) return 0;
  if (!sound(&e->token) || (e->plain && e->has_content && !sound(&e->content))) return 0;
  for (int i = 0; i < e->tops; i++)
    if (!sound(&e->top_token[i])) return 0;
  return 1;
}

/* Append what an event says; 0 where there is no memory. */
static int keep(const Event *e, Buffer *b) {
  char count[4] = {',', (char)('0' + e->tops / 10), (char)('0' + e->tops % 10)};
  if (e->tops < 10) count[1] = count[2];
  int good = add_text(&b[TEXTS], &e->token) && add(&b[IDS], ",", 1) && add(&b[IDS], e->id.at, (size_t)(e->id.end - e->id.at)) &&
             add(&b[LOGPROBS_], &e->logprob, sizeof(double)) && add(&b[COUNTS], count, e->tops < 10 ? 2 : 3);
  for (int i = 0; good && i < e->tops; i++)
    good = add_text(&b[TOP_TEXTS], &e->top_token[i]) && add(&b[TOP_IDS], ",null", 5);
  good = good && add(&b[TOP_LOGPROBS], e->top_logprob, (size_t)e->tops * sizeof(double));
  return good && (!e->plain || !e->has_content || add_said(&b[WORDS], &e->content));
}

/* ---- Python's side ---- */

/* The words so far become a piece. */
static int end_words(Buffer *words, PyObject *pieces) {
  if (!words->size) return 1;
  PyObject *said = PyUnicode_DecodeUTF8(words->at, (Py_ssize_t)words->size, NULL);
  int good = said && !PyList_Append(pieces, said);
  Py_XDECREF(said);
  words->size = 0;
  return good;
}

static int add_piece(const Event *e, Buffer *words, PyObject *pieces) {
  if (!end_words(words, pieces)) return 0;
  PyObject *delta = PyBytes_FromStringAndSize(e->delta.at, e->delta.end - e->delta.at);
  int good = delta && !PyList_Append(pieces, delta);
  Py_XDECREF(delta);
  return good;
}

static int add_columns(const Buffer *b, PyObject **columns) {
  for (int i = 0; i < COLUMNS; i++) {
    Py_ssize_t before = PyByteArray_Size(columns[i]);
    if (!b[i].size) continue;
    if (PyByteArray_Resize(columns[i], before + (Py_ssize_t)b[i].size)) return 0;
    memcpy(PyByteArray_AsString(columns[i]) + before, b[i].at, b[i].size);
  }
  return 1;
}

static PyObject *take_usual(PyObject *self, PyObject *args) {
  PyObject *bytes, *columns[COLUMNS], *pieces;
  Py_ssize_t start, tokens = 0, tops = 0;
  (void)self;
  if (!PyArg_ParseTuple(args, "SnO!O!O!O!O!O!O!O!", &bytes, &start, &PyByteArray_Type, &columns[0], &PyByteArray_Type,
                        &columns[1], &PyByteArray_Type, &columns[2], &PyByteArray_Type, &columns[3], &PyByteArray_Type,
                        &columns[4], &PyByteArray_Type, &columns[5], &PyByteArray_Type, &columns[6], &PyList_Type,
                        &pieces))
    return NULL;
  const char *data = PyBytes_AsString(bytes);
  Py_ssize_t size = PyBytes_Size(bytes);
  if (start < 0 || start > size) { PyErr_SetString(PyExc_ValueError, "the start lies outside of the bytes"); return NULL; }
  Buffer buffers[BUFFERS] = {{NULL, 0, 0}};
  Reader r = {data + start, data + size};
  Event e;
  int good = 1;
  while (good && r.at < r.end) {
    const char *from = r.at;
    if (!event(&r, &e) || !can_keep(&e)) { r.at = from; break; }
    good = keep(&e, buffers) && (e.plain || add_piece(&e, &buffers[WORDS], pieces));
    tokens++;
    tops += e.tops;
  }
  good = good && end_words(&buffers[WORDS], pieces) && add_columns(buffers, columns);
  for (int i = 0; i < BUFFERS; i++) free(buffers[i].at);
  if (!good) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
  return Py_BuildValue("nnn", (Py_ssize_t)(r.at - data), tokens, tops);
}

/* Doubles as little-endian 32-bit floats; None where that loses something (no number, for one, is never the same). */
static PyObject *singles(PyObject *self, PyObject *column) {
  (void)self;
  if (!PyByteArray_Check(column)) { PyErr_SetString(PyExc_TypeError, "a bytearray is needed"); return NULL; }
  Py_ssize_t n = PyByteArray_Size(column) / (Py_ssize_t)sizeof(double);
  const char *from = PyByteArray_AsString(column);
  PyObject *made = PyBytes_FromStringAndSize(NULL, n * 4);
  if (!made) return NULL;
  unsigned char *to = (unsigned char *)PyBytes_AsString(made);
  for (Py_ssize_t i = 0; i < n; i++) {
    double value;
    memcpy(&value, from + i * (Py_ssize_t)sizeof value, sizeof value);
    float single = value > 3e38 || value < -3e38 ? 0 : (float)value;
    uint32_t bits;
    if ((double)single != value) { Py_DECREF(made); Py_RETURN_NONE; }
    memcpy(&bits, &single, sizeof bits);
    for (int k = 0; k < 4; k++) *to++ = (unsigned char)(bits >> 8 * k);
  }
  return made;
}

static int is_calm(const char *data, const char *end) {
  const char *c;
  if (end - data < 2 || end[-1] != '\n' || end[-2] != '\n' || memchr(data, '\r', (size_t)(end - data))) return 0;
  for (c = data; (c = memchr(c, '[', (size_t)(end - c))); c++) {
    if (end - c >= 6 && !memcmp(c, "[DONE]", 6)) return 0;
    if (c + 1 < end && c[1] == ']') {
      const char *name = c - data >= 1 && c[-1] == ' ' ? c - 1 : c;
      if (name - data >= 10 && !memcmp(name - 10, "\"choices\":", 10)) return 0;
    }
  }
  for (c = data; (c = memchr(c, '_', (size_t)(end - c))); c++)
    if (c - data >= 5 && end - c >= 7 && !memcmp(c - 5, "\"tool_calls\"", 12)) return 0;
  return 1;
}

static PyObject *calm(PyObject *self, PyObject *bytes) {
  (void)self;
  if (!PyBytes_Check(bytes)) { PyErr_SetString(PyExc_TypeError, "bytes are needed"); return NULL; }
  const char *data = PyBytes_AsString(bytes);
  return PyBool_FromLong(is_calm(data, data + PyBytes_Size(bytes)));
}

/* One chunk of HTTP's, not the last; 0 where it is not whole, or spelled as nobody does. */
static int chunk(Reader *r, Text *t) {
  size_t size = 0;
  const char *from = r->at;
  for (; r->at < r->end && r->at - from < 8; r->at++) {
    char c = *r->at, low = (char)(c | 0x20);
    if (c >= '0' && c <= '9') size = size << 4 | (size_t)(c - '0');
    else if (low >= 'a' && low <= 'f') size = size << 4 | (size_t)(low - 'a' + 10);
    else break;
  }
  if (!size || !WORD(r, "\r\n") || (size_t)(r->end - r->at) < size) return 0;
  *t = (Text){r->at, r->at + size, 0};
  r->at += size;
  return WORD(r, "\r\n");
}

static PyObject *framed(PyObject *self, PyObject *args) {
  PyObject *bytes, *key;
  (void)self;
  if (!PyArg_ParseTuple(args, "SS", &bytes, &key)) return NULL;
  const char *data = PyBytes_AsString(bytes), *end = data + PyBytes_Size(bytes);
  size_t size = 0, secret = (size_t)PyBytes_Size(key);
  Text t;
  for (Reader r = {data, end}; r.at < end; size += (size_t)(t.end - t.at))
    if (!chunk(&r, &t)) Py_RETURN_NONE;
  PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
  if (!made) return NULL;
  char *said = PyBytes_AsString(made), *to = said;
  for (Reader r = {data, end}; r.at < end && chunk(&r, &t); to += t.end - t.at) memcpy(to, t.at, (size_t)(t.end - t.at));
  if (is_calm(said, to) && !(secret && memmem(said, size, PyBytes_AsString(key), secret))) return made;
  Py_DECREF(made);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
  {"take_usual", take_usual, METH_VARARGS, "As in usual.py."},
  {"singles", singles, METH_O, "As in usual.py."},
  {"calm", calm, METH_O, "As in usual.py."},
  {"framed", framed, METH_VARARGS, "As in usual.py."},
  {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_wire", NULL, 0, methods, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__wire(void) { return PyModuleDef_Init(&module); }
